"""How fast each part of an experiment is here, and what the usual actor would have cost.

python scripts/benchmark.py --config=configs/impala_atari.py --seconds=60 --json=figures.json

Takes --config and its overrides as the main binary does. Parts (--parts=sync,cleanba for a few):

  environment           random actions in a jitted loop, same pools and threads: the ceiling
  rollout               the rollout program, no learning
  learner               the learner program on one stored rollout, again and again
  fused, sync, cleanba  training with the scheme; fused where the placement is one device
  conventional_rollout, conventional_sync, conventional_cleanba
                        the same with Python between any two steps (scripts/conventional.py)

Only where --parts names them: plain_learner, plain_sync, ... the same with a plain all-reduce in
place of the exact one; shards1_sync, shards2_rollout, shards4_cleanba, ... with as many pools.

All parts are built once, stay alive, and are measured in turn, round after round, each for
seconds / rounds of a round; the others are held meanwhile, at rest. Figures are medians over the
rounds: a machine that drifts drifts for all. Compilation and the first updates are not counted. SPS
counts valid agent steps. Memory must do for a few rollouts of each part; a part runs for two
updates at least, `fused` for two calls (--config.placement.updates_per_call makes them shorter).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmark_parts
from absl import flags, logging

from podracer_jit import build, checkpoint, command_line, placement, wiring

BASES = ('environment', 'sync', 'conventional_sync', 'conventional_cleanba')  # to divide by


def measure(names: Sequence[str], parts: wiring.Parts, seconds: float, rounds: int
            ) -> dict[str, list[benchmark_parts.Figures]]:
  """Figures of each part and round."""
  found, state = {name: [] for name in names}, build.initial_state(parts)
  with contextlib.ExitStack() as stack:
    measures = {}
    for name in names:
      say(f'building {name}')
      measures[name] = benchmark_parts.make(name, parts, state, stack)
      measures[name](0.0)  # compiles what is left to compile, and warms up
    for k in range(rounds):
      say(f'round {k + 1} of {rounds}')
      for name in names:
        found[name].append(measures[name](seconds / rounds))
  return found


def summarise(found: Mapping[str, Sequence[benchmark_parts.Figures]]) -> dict[str, Any]:
  """Medians and their ratios, by part; what follows from the parts alone."""
  sps = {name: statistics.median(x.sps for x in figures) for name, figures in found.items()}
  period = {name: statistics.median(x.seconds_per_update for x in figures)
            for name, figures in found.items()}
  table = {
      name: dict(sps=sps[name], seconds_per_update=period[name], rounds=[x.sps for x in figures],
                 **{f'to_{base}': sps[name] / sps[base] if base in sps else None
                    for base in BASES})
      for name, figures in found.items()}
  derived = {}
  if {'rollout', 'learner'} <= sps.keys():
    derived['one_after_another_sps'] = 1 / (1 / sps['rollout'] + 1 / sps['learner'])
    if 'environment' in sps:
      derived['environment_share_of_rollout'] = sps['rollout'] / sps['environment']
      derived['environment_share_of_both'] = derived['one_after_another_sps'] / sps['environment']
  return dict(parts=table, derived=derived)


def describe(parts: wiring.Parts) -> dict[str, Any]:
  """Where this was measured."""
  place = parts.place
  return dict(cores=len(os.sched_getaffinity(0)), versions=checkpoint.versions(),
              actors=[str(d) for d in place.actors], learners=[str(d) for d in place.learners],
              device_kinds=sorted({d.device_kind for d in (*place.actors, *place.learners)}),
              env_threads=place.env_threads, placement=parts.config['placement'])


def show(result: Mapping[str, Any]) -> None:
  """Prints the table and what belongs to it."""
  heads = ('part', 'SPS', 'lowest', 'highest', 's/update', *('/ ' + base for base in BASES))
  print('  '.join(f'{head:>{max(9, len(head))}}' if i else f'{head:20}'
                  for i, head in enumerate(heads)))
  for name, row in result['parts'].items():
    ratios = [row[f'to_{base}'] for base in BASES]
    cells = [f'{row["sps"]:,.0f}', f'{min(row["rounds"]):,.0f}', f'{max(row["rounds"]):,.0f}',
             f'{row["seconds_per_update"]:.4f}',
             *('-' if ratio is None else f'{ratio:.3f}' for ratio in ratios)]
    print('  '.join([f'{name:20}', *(f'{cell:>{max(9, len(head))}}' for cell, head in
                                     zip(cells, heads[1:], strict=True))]))
  for name, value in (result['derived'] | result['machine']).items():
    print(f'{name}: {value}')


def say(line: str) -> None:
  """Tells how far it is."""
  print(line, file=sys.stderr, flush=True)


def define_flags() -> flags.FlagValues:
  """The script's own flags, beside those of the main binary."""
  values = flags.FlagValues()
  flags.DEFINE_list('parts', list(benchmark_parts.NAMES), 'What to measure.', flag_values=values)
  flags.DEFINE_float('seconds', 60.0, 'Measured time of each part, all rounds together.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'Rounds that this time is spread over.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  return values


def prepare(config: Mapping[str, Any], asked: Sequence[str]) -> tuple[wiring.Parts, list[str]]:
  """From a config to what is shared by all parts, and which parts to measure.

  Raises:
    ValueError: in one line, as the main binary's.
  """
  for name in set(asked) - set(benchmark_parts.ALL):
    raise ValueError(f'--parts: there is no {name!r}; known are {", ".join(benchmark_parts.ALL)}')
  placement.prepare_host(config['placement'])
  # Whatever the config says, training must not end while it is measured.
  if 'replay' in config:
    raise ValueError(f'--config: {config["loss"]["name"]} draws from a replay; '
                     'benchmark_replay.py measures that, benchmark_schemes.py the training')
  parts = build.make_parts(config | dict(scheme='sync', total_steps=2**31 - 1))
  names = [name for name in benchmark_parts.ALL if name in asked]
  if (any('conventional' in name for name in names)
      and (parts.config['normalise']['reward'] or parts.network.core)):
    raise ValueError('--parts: the conventional actor knows neither normalise.reward nor '
                     'network.core; name parts without it')
  actors, learners = parts.place.actors, parts.place.learners
  if 'fused' in names and (len(actors) > 1 or actors != learners):
    say('fused: left out, the placement is more than one device')
    names.remove('fused')
  return parts, names


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)  # who is held waits long, and would say so
  values = define_flags()
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    parts, names = prepare(config, values.parts)
  except ValueError as error:
    print(f'benchmark: {error}', file=sys.stderr)
    return 2
  found = measure(names, parts, values.seconds, values.rounds)
  result = dict(config=parts.config, machine=describe(parts)) | summarise(found)
  show(result)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
