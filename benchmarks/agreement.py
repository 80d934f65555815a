"""Checks that an experiment has the same bits under all schemes and placements that must agree.

.venv/bin/python -m benchmarks.agreement [--configs=ppo_cartpole,impala_catch] [--updates=100]

Runs each shipped config under all schemes with the same lag (0 or 1 update), on one device and on
several. Compares the fingerprints of each update's batch and parameters. If two runs differ, it
prints the first different update and the islands (`numerics.islands`) that are the cause.
A config with slow updates makes a tenth of them, or a few more if its replay is filled later; see
--seconds.

Exit code: 0 all are identical, 1 some differ, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import os
import pkgutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('NPROC', '16')  # threads of XLA's pool

import jax  # noqa: E402

from benchmarks.compiled import islands, recorded  # noqa: E402
from benchmarks.island_outputs import Outputs, causes, recorded_outputs  # noqa: E402
from podracer_jit import configs, loops  # noqa: E402
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve  # noqa: E402
from podracer_jit.numerics.fingerprints import as_hex  # noqa: E402
from podracer_jit.schemes.table import SCHEMES  # noqa: E402

DEVICES = 8


class Variant(NamedTuple):
  """A scheme and a placement to run an experiment with."""

  scheme: str
  actors: tuple[int, ...]
  learners: tuple[int, ...]
  updates_per_call: int = 1

  def __str__(self):
    return f'{self.scheme} {self.actors} {self.learners}'.replace(' ', '')


class Run(NamedTuple):
  """The receipts and the speed of a run."""

  receipts: list[tuple[str, str]]  # fingerprints of batch and parameters of each update
  seconds_per_update: float  # once everything is compiled


def variants(config: Mapping[str, Any], lag: int) -> list[Variant]:
  """Returns the schemes and placements with this lag; all of them must give the same bits.

  Args:
    config: nested dicts; the scheme and placement in it are ignored.
    lag: the age of the parameters that make the rollouts, in updates.
  """
  replay = resolve(copy.deepcopy(dict(config) | dict(scheme='sync'))).algorithm.learns_from_replay

  def devices(*sizes: int) -> int:
    """Returns the largest number of devices, up to four, that divides every size."""
    return max(n for n in (1, 2, 3, 4) if all(size % n == 0 for size in sizes))

  shards = config['num_shards']
  groups = config['num_grad_shards']
  num_workers = devices(shards, groups)
  first_devices = tuple(range(num_workers))
  next_devices = tuple(range(num_workers, 2 * num_workers))
  ways = []
  for name, scheme in SCHEMES.items():
    if not scheme.deterministic or scheme.lag != lag or scheme.replay not in (None, replay):
      continue
    if scheme.graph.one_program:
      ways.append(Variant(name, (0,), (0,), 7))
    elif scheme.alone:
      ways.append(Variant(name, (0,), (0,)))
    elif scheme.colocated:
      ways.append(Variant(name, first_devices, first_devices))
    elif scheme.graph.separate_updates:
      ways.append(Variant(name, first_devices, next_devices))
    else:
      ways.append(Variant(name, (0,), (0,)))
      # The learner's devices are in descending order, to show that their order does not matter.
      ways.append(Variant(name, tuple(range(devices(shards))),
                           tuple(range(7, 7 - devices(groups), -1))))
  return ways


def run(config: Mapping[str, Any], variant: Variant, updates: int) -> Run:
  """Runs the first updates of an experiment in this process.

  Raises:
    ValueError: the config is invalid with this scheme and placement.
  """
  config = copy.deepcopy(dict(config)) | dict(scheme=variant.scheme)
  config['placement'] = dict(config['placement']) | dict(
      actor_devices=variant.actors, learner_devices=variant.learners, actors_per_device=1,
      updates_per_call=variant.updates_per_call)
  config['env'] = dict(config['env']) | dict(renew_every_updates=0)
  reports = []
  times = [time.monotonic()]

  def receive(report: Any) -> None:
    reports.append(report)
    times.append(time.monotonic())

  training = build.make_run(resolve(config))
  state = training.learner.allocate(training.initial_state())
  with build.segment(training, build.Snapshot(state), updates, receive) as segment:
    loops.run(segment.workers)

  # The first report comes after all compilations.
  later_updates = updates - reports[0].count
  seconds = (times[-1] - times[1]) / later_updates if later_updates else times[1] - times[0]

  receipts = []
  for report in reports:
    metrics = jax.device_get(report.metrics)
    receipts += [(as_hex(metrics['batch'][i]), as_hex(metrics['params'][i]))
                 for i in range(report.count)]
  return Run(receipts, seconds)


class _Record(NamedTuple):
  """A run with a record of its islands."""

  run: Run
  outputs: Outputs  # what the islands computed
  bodies: dict[str, set[str]]  # the compiled arithmetic of each island


def _recorded_run(config: Mapping[str, Any], variant: Variant, updates: int) -> _Record:
  """Does what `run` does, and records the islands."""
  # Programs that were compiled before would not be recorded.
  jax.clear_caches()
  with recorded() as texts, recorded_outputs() as outputs:
    recorded_run = run(config, variant, updates)
  # Later runs must not use programs that record.
  jax.clear_caches()
  bodies: dict[str, set[str]] = {}
  for text in texts:
    for name, compiled in islands(text).items():
      bodies.setdefault(name, set()).update(compiled)
  return _Record(recorded_run, outputs, bodies)


def first_difference(run_a: Run, run_b: Run) -> tuple[int, str] | None:
  """Returns the first update in which two runs differ and what differs; None if they are equal."""
  for update, (a, b) in enumerate(zip(run_a.receipts, run_b.receipts, strict=False), 1):
    if a != b:
      # Equal batches mean that the rollout was the same and the learner's update was not.
      return update, 'parameters' if a[0] == b[0] else 'batch'
  if len(run_a.receipts) != len(run_b.receipts):
    fewer, more = sorted([len(run_a.receipts), len(run_b.receipts)])
    return fewer + 1, f'{fewer} and {more} updates'
  return None


def cause(config: Mapping[str, Any], ways: tuple[Variant, Variant], update: int) -> str:
  """Repeats an experiment in two ways to find the islands that differ.

  Args:
    config: the config of the experiment, as nested dicts.
    ways: two variants whose runs differ.
    update: the first update that differs.

  Returns:
    The islands that had equal arguments and different results. If there is none, the islands that
    are compiled differently in the two programs.
  """
  a, b = (_recorded_run(config, way, update) for way in ways)
  names = causes(a.outputs, b.outputs)
  if names:
    return f'equal arguments and different results: islands {", ".join(names)}'

  names = sorted(name for name in a.bodies.keys() & b.bodies.keys()
                 if a.bodies[name] != b.bodies[name])
  if names:
    return f'compiled differently: islands {", ".join(names)}'
  if first_difference(a.run, b.run) is None:
    return 'the runs are equal while the results of islands are recorded'
  return 'all islands agree, so the difference arises between islands'


def disagreement(config: Mapping[str, Any], ways: tuple[Variant, Variant], run_a: Run, run_b: Run
                 ) -> str:
  """Returns the first difference of two runs and its cause; '' if they are equal.

  Args:
    config: the config of both runs, as nested dicts.
    ways: the variants of the runs.
    run_a: the run in the first way.
    run_b: the run in the second way.
  """
  difference = first_difference(run_a, run_b)
  if difference is None:
    return ''
  update, words = difference
  return f'differ at update {update} ({words}); {cause(config, ways, update)}'


def disagreements(config: Mapping[str, Any], ways: list[Variant], updates: int
                  ) -> Iterator[tuple[Variant, str]]:
  """Yields each later variant with its `disagreement` with the first variant."""
  first = run(config, ways[0], updates)
  for way in ways[1:]:
    yield way, disagreement(config, (ways[0], way), first, run(config, way, updates))


def shipped() -> list[str]:
  """Returns the names of all shipped configs."""
  return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def shipped_config(name: str) -> dict[str, Any]:
  """Returns a shipped config as nested dicts; if it names no task, the task is Pong."""
  config = importlib.import_module(f'podracer_jit.configs.{name}').get_config().to_dict()
  config['env']['task'] = config['env']['task'] or 'Pong-v5'
  if 'replay' in config:
    config['replay']['params_every'] = 1  # deterministic schemes allow no other value
  return config


def fewest_updates(config: Mapping[str, Any], updates: int) -> int:
  """Returns a tenth of the updates, or more if no parameter changes in so few.

  Args:
    config: nested dicts.
    updates: the most to return.
  """
  fewest = max(1, updates // 10)
  if 'replay' in config:
    rows = config['env']['num_envs'] * config['unroll_length']
    items = resolve(copy.deepcopy(dict(config))).items
    first_that_learns = (math.ceil(config['replay']['min_size'] * items.period / rows)
                         + items.length // config['unroll_length'])
    fewest = max(fewest, first_that_learns + 4)
  return min(fewest, updates)


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--configs', default=','.join(shipped()),
                      help='names of shipped configs, separated by commas')
  parser.add_argument('--updates', type=int, default=100, help='updates of each run')
  parser.add_argument('--seconds', type=float, default=300.0,
                      help='if a run would take longer, it makes about a tenth of its updates')
  args = parser.parse_args()
  unknown = sorted(set(args.configs.split(',')) - set(shipped()))
  if unknown:
    print(f'--configs: unknown config {unknown[0]}; shipped are {", ".join(shipped())}',
          file=sys.stderr)
    return 2
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  jax.config.update('jax_num_cpu_devices', DEVICES)
  # JAX starts now, since configs whose environments are JAX functions would set the number again.
  jax.devices()
  all_same = True
  for name in args.configs.split(','):
    config = shipped_config(name)
    for lag in (0, 1):
      ways = variants(config, lag)
      updates = args.updates

      # A few updates tell how long all of them would take.
      few = fewest_updates(config, updates)
      first = run(config, ways[0], few)
      if first.seconds_per_update * updates <= args.seconds:
        first = run(config, ways[0], updates)
      else:
        updates = few

      for way in ways[1:]:
        words = disagreement(config, (ways[0], way), first, run(config, way, updates))
        all_same &= not words
        print(f'{"DIFFERENT" if words else "identical":9}  {name:26} {ways[0]!s:18} {way!s:24} '
              f'{words or f"{updates} updates"}', flush=True)
      jax.clear_caches()  # otherwise the programs of all configs would stay in memory
  return 0 if all_same else 1


if __name__ == '__main__':
  sys.exit(main())
