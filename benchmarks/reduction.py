"""Measures time and traffic of the exact sum of gradients, compared with a plain all-reduce.

.venv/bin/python -m benchmarks.reduction --config=configs/impala_atari.py:nature_cnn --seconds=3

The script sums gradients of the config's network in 8 groups, on 1, 2, 4 and 8 devices, as far as
the machine has them. CPU devices are virtual and share the cores.

- `exact`: each device adds its groups as far as the fixed order allows. Then the devices gather all
  partial sums. From six devices on, each device instead receives a slice of the partial sums, adds
  it down to two sums, and the devices gather these.
- `plain`: XLA's all-reduce of one group a device, as with exact_reduce=False.

The two take turns; times are medians of whole calls. MB (10^6 bytes) are what each device receives
in one reduction, from the sizes of the collectives in the compiled program. An all-to-all or
all-gather counts its result without the device's own part. An all-reduce over D devices counts
2 (D - 1) / D of its result, like a ring. If the figure differs from the one expected by the shapes,
the script prints both. A line by least squares gives the exact sum's time as a + b GB received.

`learner` is the time of an update of the whole learner on the same devices, with one reduction per
gradient step. `share` is the exact reductions' share of that time; `extra` is the share that plain
ones would save. Takes --config and its overrides as training does, except for num_grad_shards and
the devices.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common import parse_config, refuse_replay, with_default
from benchmarks.parts import timed_parts
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics.deterministic import AXIS, exact_sum, plain_sum, use_reduce_scatter
from podracer_jit.runtime import host, placement
from podracer_jit.workdir import record

GROUPS = 8
MESHES = (1, 2, 4, 8)  # devices
LEAST_CALLS = 5  # a median needs at least so many
COLUMNS = {  # of the table: head -> (field, its format)
    'devices': ('devices', '7'), 'exact ms': ('exact_ms', '9.2f'), 'plain ms': ('plain_ms', '9.2f'),
    'exact MB': ('exact_mb', '9.2f'), 'plain MB': ('plain_mb', '9.2f'),
    'learner ms': ('learner_ms', '11,.1f'), 'share': ('share', '7.2%'), 'extra': ('extra', '7.2%')}


class Line(NamedTuple):
  """The line y = a + b x, fitted by least squares."""

  a: float
  b: float
  residual: float  # root mean square of y - (a + b x)


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
  """Fits a line to two or more points."""
  design = np.stack([np.ones(len(x)), x], axis=1)
  y = np.asarray(y)
  coefficients = np.linalg.lstsq(design, y, rcond=None)[0]
  residual = np.sqrt(np.mean((y - design @ coefficients)**2))
  return Line(*map(float, coefficients), float(residual))


def bytes_by_shapes(parameters: int, groups: int, devices: int) -> dict[str, float]:
  """Returns the bytes that each device should receive for f32 gradients of so many parameters."""
  groups_per_device = groups // devices
  # A device can add its groups before sending only if they are a whole subtree of the fixed order
  # of additions, see `deterministic.partial_sums`.
  is_subtree = groups_per_device.bit_count() == 1
  rows = 1 if is_subtree else groups_per_device

  share = (devices - 1) / devices
  if use_reduce_scatter(rows, parameters, devices):
    padded = -(-parameters // devices) * devices
    exact = share * (rows + 2) * padded
  else:
    exact = (devices - 1) * rows * parameters
  return dict(exact=exact * 4, plain=2 * share * parameters * 4)


def bytes_in_program(hlo: str, devices: int) -> float:
  """Returns the bytes that each device receives, by the collectives in a compiled program."""
  received = 0.0
  for shapes, kind, start in re.findall(
      r'= (\S.*?) (all-to-all|all-gather|all-reduce)(-start)?\(', hlo):
    sizes = [_bytes(*shape) for shape in re.findall(r'\b(pred|[a-z]+\d+)\[([\d,]*)\]', shapes)]
    if kind != 'all-reduce' and start:
      sizes = sizes[len(sizes) // 2:]  # the shape of a -start has the operands, then the results
    share = (devices - 1) / devices
    received += sum(sizes) * share * (2 if kind == 'all-reduce' else 1)
  return received


def _bytes(dtype: str, dimensions: str) -> int:
  """Returns the bytes of an HLO shape, for example ('f32', '8,10')."""
  width = 1 if dtype == 'pred' else int(re.search(r'\d+', dtype)[0]) // 8
  return width * int(np.prod([int(n) for n in dimensions.split(',') if n]))


class Reduction(NamedTuple):
  """A sum over all groups, compiled for a mesh, with its input."""

  program: Callable
  trees: Any  # [groups, ...], sharded by group

  def __call__(self) -> None:
    jax.block_until_ready(self.program(self.trees))


def make_reduction(sum_groups: Callable, like: Any, groups: int, devices: Sequence[jax.Device]
                   ) -> Reduction:
  """Compiles a sum over groups and draws a random input.

  Args:
    sum_groups: `exact_sum` or `plain_sum`.
    like: a tree of arrays or of their shapes; a group has one such tree.
    groups: number of groups, a multiple of the number of devices.
    devices: the devices of the mesh.
  """
  mesh = placement.mesh_of(devices)
  sharding = NamedSharding(mesh, PartitionSpec(AXIS))
  rng = np.random.default_rng(1)

  def random(x):
    values = rng.standard_normal((groups, *x.shape), np.float32).astype(x.dtype)
    return jax.device_put(values, sharding)

  trees = jax.tree.map(random, like)
  program = jax.shard_map(lambda trees: sum_groups(trees, mesh.size), mesh=mesh,
                          in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(),
                          check_vma=False)
  return Reduction(jax.jit(program).lower(trees).compile(), trees)


def seconds_of_calls(calls: Mapping[str, Callable[[], None]], seconds: float) -> dict[str, float]:
  """Makes the calls in turn for so many seconds; returns the median seconds of each."""
  times = {name: [] for name in calls}
  for call in calls.values():
    call()  # warms up

  start = time.perf_counter()
  while time.perf_counter() - start < seconds or min(map(len, times.values())) < LEAST_CALLS:
    for name, call in calls.items():
      begin = time.perf_counter()
      call()
      times[name].append(time.perf_counter() - begin)
  return {name: statistics.median(column) for name, column in times.items()}


def measure(run: build.Run, seconds: float) -> dict[str, Any]:
  """Returns the figures of one mesh, that of the run."""
  state = run.initial_state()
  devices = run.place.learners
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  reductions = dict(exact=make_reduction(exact_sum, state.params, GROUPS, devices),
                    plain=make_reduction(plain_sum, state.params, len(devices), devices))
  times = seconds_of_calls(reductions, seconds)
  counted = {name: bytes_in_program(reduction.program.as_text(), len(devices))
             for name, reduction in reductions.items()}
  del reductions  # frees the memory of their gradients

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
  """Returns a line of the table, and a second one if the program's traffic is unexpected."""
  line = '  '.join(f'{figures[field]:{form}}' for field, form in COLUMNS.values())
  for name in ('exact', 'plain'):
    counted = figures[f'{name}_mb']
    expected = figures[f'{name}_mb_by_shapes']
    if not np.isclose(counted, expected):
      line += f'\n{name}: {expected:.2f} MB by the shapes, {counted:.2f} in the program'
  return line


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Fits a line to the exact sum's times in s over GB received; None for fewer than three rows."""
  if len(rows) < 3:
    return dict(fit=None)
  line = fit([x['exact_mb'] / 1e3 for x in rows], [x['exact_ms'] / 1e3 for x in rows])
  return dict(fit=dict(a_s=line.a, b_s_per_gb=line.b, residual_s=line.residual))


def show(result: Mapping[str, Any]) -> None:
  """Prints the fitted line and a note on CPU devices below the table."""
  line = result['fit']
  cores = result['cores']
  if line:
    print(f'exact: {line["a_s"] * 1e3:.2f} ms + {line["b_s_per_gb"]:.3f} s/GB received, '
          f'with a residual of {line["residual_s"] * 1e3:.2f} ms (root mean square)')
  if result['platform'] == 'cpu':
    print(f'the devices are virtual and share {cores} cores and one memory: the cores do the work '
          'of all D devices,\nso these times grow with D where those of D machines would not')


def placed(experiment: Experiment, devices: int) -> Experiment:
  """Returns the experiment with its learner on so many devices."""
  place = dict(actor_devices=(0,), actors_per_device=1, learner_devices=tuple(range(devices)),
               xla_threads=max(experiment.placement.xla_threads, devices))
  return changed(experiment, scheme='sync', exact_reduce=True, num_grad_shards=GROUPS,
                 total_steps=2**30, placement=place)


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_float('seconds', 3.0,
                     'Measured time of the reductions of a mesh, and again of its learner.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  return values


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  values = define_flags()
  rows = []
  try:
    config = parse_config(with_default(argv), values, __doc__)
    if config is None:
      return 0
    experiment = resolve(config)
    refuse_replay(experiment)
    host.prepare_host(placed(experiment, max(MESHES)).placement, experiment.numerics.deterministic)
    runs = [build.make_run(placed(experiment, n)) for n in MESHES if n <= len(jax.devices())]
  except ValueError as error:
    print(f'reduction: {error}', file=sys.stderr)
    return 2
  widths = {head: int(re.match('[0-9]+', form)[0]) for head, (_, form) in COLUMNS.items()}
  print('  '.join(f'{head:>{width}}' for head, width in widths.items()), flush=True)
  for run in runs:
    rows.append(measure(run, values.seconds))
    print(row(rows[-1]), flush=True)
  result = dict(config=experiment.fields, groups=GROUPS, cores=len(os.sched_getaffinity(0)),
                platform=jax.default_backend(), versions=record.versions(),
                rows=rows) | summarise(rows)
  print(f'{rows[0]["parameters"]:,} parameters, {GROUPS} groups')
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
