"""What the exact sum of gradients costs: its time, and its bytes on the wire, beside an all-reduce.

.venv/bin/python -m benchmarks.reduction --config=configs/impala_atari.py:nature_cnn --seconds=3

Gradients of the config's network in 8 groups, on 1, 2, 4 and 8 devices (as many as there are; of a
CPU they are virtual and share its cores). `exact`: the groups of a device added as far as the fixed
order lets; then all partial sums are gathered or, from six devices on, each device gets a slice of
them, adds it down to two sums, and these are gathered. `plain`: XLA's all-reduce of one group a
device, as exact_reduce=False has it. The two take turns; times are medians of whole calls.

MB (10^6 bytes) are what each device receives in one reduction, from the sizes of the collectives in
the compiled program: of an all-to-all or all-gather its result but for the device's own part, of
an all-reduce 2 (D - 1) / D of its result, as a ring makes it. Where the shapes alone say otherwise,
that is printed. By least squares the exact sum's time is a + b GB of them.

`learner` is the time of an update of the whole learner on as many devices, whose reductions are one
each gradient step; `share` what the exact ones are of it, and `extra` what plain ones would save.
Takes --config and its overrides as training does, but for num_grad_shards and the devices.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags, logging
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common import refuse_replay, with_default
from podracer_jit.numerics.deterministic import AXIS, exact_sum, plain_sum, use_reduce_scatter
from podracer_jit.run import build, command_line, workdirs
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.measure import timed_parts
from podracer_jit.run.resolve import changed, resolve
from podracer_jit.runtime import host, placement

GROUPS = 8
MESHES = (1, 2, 4, 8)  # devices
LEAST_CALLS = 5  # of a median
COLUMNS = {  # of the table: head -> (field, its format)
    'devices': ('devices', '7'), 'exact ms': ('exact_ms', '9.2f'), 'plain ms': ('plain_ms', '9.2f'),
    'exact MB': ('exact_mb', '9.2f'), 'plain MB': ('plain_mb', '9.2f'),
    'learner ms': ('learner_ms', '11,.1f'), 'share': ('share', '7.2%'), 'extra': ('extra', '7.2%')}


class Line(NamedTuple):
  """y = a + b x by least squares, and the root mean square of what is left, in units of y."""

  a: float
  b: float
  residual: float


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
  """The line through points, of which there are two at least."""
  design, y = np.stack([np.ones(len(x)), x], axis=1), np.asarray(y)
  found = np.linalg.lstsq(design, y, rcond=None)[0]
  return Line(*map(float, found), float(np.sqrt(np.mean((y - design @ found)**2))))


def bytes_by_shapes(parameters: int, groups: int, devices: int) -> dict[str, float]:
  """Bytes that each device receives, of f32 gradients of so many parameters."""
  here = groups // devices
  rows = 1 if here.bit_count() == 1 else here  # as `exact.branches` adds them up
  share = (devices - 1) / devices
  padded = -(-parameters // devices) * devices
  exact = (share * (rows + 2) * padded if use_reduce_scatter(rows, parameters, devices)
           else (devices - 1) * rows * parameters)
  return dict(exact=exact * 4, plain=2 * share * parameters * 4)


def bytes_in_program(hlo: str, devices: int) -> float:
  """Bytes that each device receives, by the collectives in the text of a compiled program."""
  received = 0.0
  for shapes, kind, start in re.findall(
      r'= (\S.*?) (all-to-all|all-gather|all-reduce)(-start)?\(', hlo):
    sizes = [_bytes(*shape) for shape in re.findall(r'\b(pred|[a-z]+\d+)\[([\d,]*)\]', shapes)]
    if kind != 'all-reduce' and start:
      sizes = sizes[len(sizes) // 2:]  # its operands come first
    share = (devices - 1) / devices
    received += sum(sizes) * share * (2 if kind == 'all-reduce' else 1)
  return received


def _bytes(dtype: str, dimensions: str) -> int:
  width = 1 if dtype == 'pred' else int(re.search(r'\d+', dtype)[0]) // 8
  return width * int(np.prod([int(n) for n in dimensions.split(',') if n]))


class Reduction(NamedTuple):
  """A sum over all groups, compiled for a mesh, with what it is given."""

  program: Callable
  trees: Any  # [groups, ...], cut by group

  def __call__(self) -> None:
    jax.block_until_ready(self.program(self.trees))


def make_reduction(sum_groups: Callable, like: Any, groups: int, devices: Sequence[jax.Device]
                   ) -> Reduction:
  """Of trees like `like`, which has arrays or their shapes."""
  mesh, generator = placement.mesh_of(devices), np.random.default_rng(1)
  sharding = NamedSharding(mesh, PartitionSpec(AXIS))
  trees = jax.tree.map(lambda x: jax.device_put(
      generator.standard_normal((groups, *x.shape), np.float32).astype(x.dtype), sharding), like)
  whole = jax.shard_map(lambda trees: sum_groups(trees, mesh.size), mesh=mesh,
                        in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(), check_vma=False)
  return Reduction(jax.jit(whole).lower(trees).compile(), trees)


def seconds_of_calls(fires: Mapping[str, Callable[[], None]], seconds: float) -> dict[str, float]:
  """The median of each; they take turns for so long."""
  found = {name: [] for name in fires}
  for fire in fires.values():
    fire()
  start = time.perf_counter()
  while (time.perf_counter() - start < seconds
         or min(len(times) for times in found.values()) < LEAST_CALLS):
    for name, fire in fires.items():
      begin = time.perf_counter()
      fire()
      found[name].append(time.perf_counter() - begin)
  return {name: statistics.median(times) for name, times in found.items()}


def measure(run: build.Run, seconds: float) -> dict[str, Any]:
  """Figures of one mesh, that of the run."""
  state, devices = run.initial_state(), run.place.learners
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  reductions = dict(exact=make_reduction(exact_sum, state.params, GROUPS, devices),
                    plain=make_reduction(plain_sum, state.params, len(devices), devices))
  times = seconds_of_calls(reductions, seconds)
  counted = {name: bytes_in_program(reduction.program.as_text(), len(devices))
             for name, reduction in reductions.items()}
  del reductions
  learner = timed_parts.learner(run, state)
  learner(0.0)  # warms up
  update_s = learner(seconds).seconds_per_update
  steps = run.learner.gradient_steps
  by_shapes = bytes_by_shapes(parameters, GROUPS, len(devices))
  return dict(
      devices=len(devices), parameters=parameters,
      **{f'{name}_ms': value * 1e3 for name, value in times.items()},
      **{f'{name}_mb': value / 1e6 for name, value in counted.items()},
      **{f'{name}_mb_by_shapes': value / 1e6 for name, value in by_shapes.items()},
      learner_ms=update_s * 1e3, share=steps * times['exact'] / update_s,
      extra=steps * (times['exact'] - times['plain']) / update_s)


def row(figures: Mapping[str, Any]) -> str:
  """A line of the table, and one more where the program does not send what it should."""
  line = '  '.join(f'{figures[field]:{form}}' for field, form in COLUMNS.values())
  for name in ('exact', 'plain'):
    counted, expected = figures[f'{name}_mb'], figures[f'{name}_mb_by_shapes']
    if not np.isclose(counted, expected):
      line += f'\n{name}: {expected:.2f} MB by the shapes, {counted:.2f} in the program'
  return line


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """The line through the exact sum's times, where there are meshes enough; s, s/GB and s."""
  if len(rows) < 3:
    return dict(fit=None)
  line = fit([x['exact_mb'] / 1e3 for x in rows], [x['exact_ms'] / 1e3 for x in rows])
  return dict(fit=dict(a_s=line.a, b_s_per_gb=line.b, residual_s=line.residual))


def show(result: Mapping[str, Any]) -> None:
  """Prints what belongs to the table."""
  line, cores = result['fit'], result['cores']
  if line:
    print(f'exact: {line["a_s"] * 1e3:.2f} ms + {line["b_s_per_gb"]:.3f} s/GB received, '
          f'with a residual of {line["residual_s"] * 1e3:.2f} ms (root mean square)')
  if result['platform'] == 'cpu':
    print(f'the devices are virtual and share {cores} cores and one memory: of D devices the cores '
          'do the work of all D,\nso these times grow where those of a network with D machines '
          'would not')


def placed(experiment: Experiment, devices: int) -> Experiment:
  """The experiment with its learner on so many devices."""
  place = dict(actor_devices=(0,), actors_per_device=1, learner_devices=tuple(range(devices)),
               xla_threads=max(experiment.placement.xla_threads, devices))
  return changed(experiment, scheme='sync', exact_reduce=True, num_grad_shards=GROUPS,
                 total_steps=2**30, placement=place)


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_float('seconds', 3.0, 'For the reductions of a mesh, and as much for its learner.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  return values


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)
  values, rows = define_flags(), []
  try:
    config = command_line.parse(with_default(argv), values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    experiment = resolve(config)
    refuse_replay(experiment)
    host.prepare_host(placed(experiment, max(MESHES)).placement)
    runs = [build.make_run(placed(experiment, n)) for n in MESHES if n <= len(jax.devices())]
  except ValueError as error:
    print(f'reduction: {error}', file=sys.stderr)
    return 2
  print('  '.join(f'{head:>{int(re.match("[0-9]+", form)[0])}}'
                  for head, (_, form) in COLUMNS.items()), flush=True)
  for run in runs:
    rows.append(measure(run, values.seconds))
    print(row(rows[-1]), flush=True)
  result = dict(config=experiment.fields, groups=GROUPS, cores=len(os.sched_getaffinity(0)),
                platform=jax.default_backend(), versions=workdirs.versions(),
                rows=rows) | summarise(rows)
  print(f'{rows[0]["parameters"]:,} parameters, {GROUPS} groups')
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
