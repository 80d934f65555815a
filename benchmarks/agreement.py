"""Says whether an experiment has the same bits under every scheme and placement that must agree.

.venv/bin/python -m benchmarks.agreement [--configs=ppo_cartpole,impala_catch] [--updates=100]

Runs each shipped config as it is, under every scheme without a lag, or of its replay, and under
every scheme with the same lag, on one device and on several, and compares the fingerprints of each
update's batch and parameters. Where two runs part it names the update and the islands
(`numerics.islands`) whose compiled bodies differ. A config whose updates take long makes fewer of
them, as --seconds says.

Exit code: 0 all identical, 1 some differ, 2 nothing could be started.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import pkgutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('NPROC', '16')  # the size of XLA's thread pool belongs to the experiment

import jax  # noqa: E402

from benchmarks.compiled import islands, recorded  # noqa: E402
from podracer_jit import configs, loops  # noqa: E402
from podracer_jit.numerics.fingerprints import as_hex  # noqa: E402
from podracer_jit.run import build  # noqa: E402
from podracer_jit.run.resolve import resolve  # noqa: E402
from podracer_jit.schemes.table import SCHEMES  # noqa: E402

DEVICES = 8


class Variant(NamedTuple):
  """One way to run an experiment."""

  scheme: str
  actors: tuple[int, ...]
  learners: tuple[int, ...]
  updates_per_call: int = 1

  def __str__(self):
    return f'{self.scheme} {self.actors} {self.learners}'.replace(' ', '')


class Run(NamedTuple):
  """Receipts and compiled islands of a run."""

  receipts: list[tuple[str, str]]  # fingerprints of batch and parameters of each update
  bodies: dict[str, set[str]]  # the compiled arithmetic of each island
  seconds: float


def variants(config: Mapping[str, Any], lag: int) -> list[Variant]:
  """Returns the ways to run an experiment that have this lag, and so the same bits.

  Args:
    config: nested dicts; its own scheme and placement do not matter.
    lag: of the parameters of rollouts, in updates.
  """
  replay = resolve(copy.deepcopy(dict(config) | dict(scheme='sync'))).algorithm.learns_from_replay

  def devices(*sizes: int) -> int:
    """The most devices, up to four, that share each of these numbers evenly."""
    return max(n for n in (1, 2, 3, 4) if all(size % n == 0 for size in sizes))

  shards, groups = config['num_shards'], config['num_grad_shards']
  both = devices(shards, groups)
  here, there = tuple(range(both)), tuple(range(both, 2 * both))
  ways = []
  for name, scheme in SCHEMES.items():
    if not scheme.deterministic or scheme.lag != lag or scheme.replay not in (None, replay):
      continue
    if scheme.graph.one_program:
      ways.append(Variant(name, (0,), (0,), 7))
    elif scheme.alone:
      ways.append(Variant(name, (0,), (0,)))
    elif scheme.colocated:
      ways.append(Variant(name, here, here))
    elif scheme.graph.separate_updates:
      ways.append(Variant(name, here, there))
    else:
      ways.append(Variant(name, (0,), (0,)))
      ways.append(Variant(name, tuple(range(devices(shards))),
                           tuple(range(7, 7 - devices(groups), -1))))
  return ways


def run(config: Mapping[str, Any], variant: Variant, updates: int) -> Run:
  """Runs the first updates of an experiment in this process.

  Raises:
    ValueError: the experiment, or the variant of it, cannot be.
  """
  config = copy.deepcopy(dict(config)) | dict(scheme=variant.scheme)
  config['placement'] = dict(config['placement']) | dict(
      actor_devices=variant.actors, learner_devices=variant.learners, actors_per_device=1,
      updates_per_call=variant.updates_per_call)
  config['checkpoint'] = dict(config['checkpoint']) | dict(every_updates=max(
      updates, config['checkpoint']['every_updates']))
  start, reports = time.monotonic(), []
  with recorded() as texts:
    whole = build.make_run(resolve(config))
    state = whole.learner.allocate(whole.initial_state())
    with build.segment(whole, state, 0, updates, reports.append) as segment:
      loops.run(segment.workers)
  receipts = []
  for report in reports:
    metrics = jax.device_get(report.metrics)
    receipts += [(as_hex(metrics['batch'][i]), as_hex(metrics['params'][i]))
                 for i in range(report.count)]
  bodies: dict[str, set[str]] = {}
  for text in texts:
    for name, compiled in islands(text).items():
      bodies.setdefault(name, set()).update(compiled)
  jax.clear_caches()
  return Run(receipts, bodies, time.monotonic() - start)


def first_difference(one: Run, other: Run) -> str:
  """Returns where two runs part and what may be to blame, in words; '' where they do not."""
  for update, (a, b) in enumerate(zip(one.receipts, other.receipts, strict=False), 1):
    if a != b:
      what = 'parameters' if a[0] == b[0] else 'batch'
      both = one.bodies.keys() & other.bodies.keys()
      names = sorted(name for name in both if one.bodies[name] != other.bodies[name])
      blame = f'islands with other bodies: {", ".join(names)}' if names else \
          'no island has another body, so it arises between islands'
      return f'differ at update {update} ({what}); {blame}'
  if len(one.receipts) != len(other.receipts):
    return f'{len(one.receipts)} and {len(other.receipts)} updates'
  return ''


def disagreements(config: Mapping[str, Any], ways: list[Variant], updates: int
                  ) -> Iterator[tuple[Variant, str]]:
  """Yields each variant but the first with how it differs from the first; '' where it does not."""
  first = run(config, ways[0], updates)
  for way in ways[1:]:
    yield way, first_difference(first, run(config, way, updates))


def shipped() -> list[str]:
  """Returns the names of all shipped configs."""
  return sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def shipped_config(name: str) -> dict[str, Any]:
  """Returns a shipped config as nested dicts; of several tasks, Pong."""
  config = importlib.import_module(f'podracer_jit.configs.{name}').get_config().to_dict()
  config['env']['task'] = config['env']['task'] or 'Pong-v5'
  if 'replay' in config:
    config['replay']['params_every'] = 1  # others are for schemes that do not repeat
  return config


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--configs', default=','.join(shipped()), help='shipped configs, by comma')
  parser.add_argument('--updates', type=int, default=100, help='of each run')
  parser.add_argument('--seconds', type=float, default=300.0,
                      help='a config whose updates would take longer makes a tenth of them')
  args = parser.parse_args()
  unknown = sorted(set(args.configs.split(',')) - set(shipped()))
  if unknown:
    print(f'--configs: there is no {unknown[0]}; there are {", ".join(shipped())}', file=sys.stderr)
    return 2
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  jax.config.update('jax_num_cpu_devices', DEVICES)
  all_same = True
  for name in args.configs.split(','):
    config = shipped_config(name)
    for lag in (0, 1):
      ways, updates = variants(config, lag), args.updates
      few = max(1, updates // 10)
      first = run(config, ways[0], few)
      if first.seconds * updates / few <= args.seconds:
        first = run(config, ways[0], updates)
      else:
        updates = few
      for way in ways[1:]:
        words = first_difference(first, run(config, way, updates))
        all_same &= not words
        print(f'{"DIFFERENT" if words else "identical":9}  {name:26} {ways[0]!s:18} {way!s:24} '
              f'{words or f"{updates} updates"}', flush=True)
  return 0 if all_same else 1


if __name__ == '__main__':
  sys.exit(main())
