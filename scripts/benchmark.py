"""How fast each part of an experiment is here, and what the usual actor would have cost.

python scripts/benchmark.py --config=configs/impala_atari.py --seconds=60 --json=figures.json

Takes --config and its overrides as the main binary does; its scheme does not matter, parts name
theirs. Parts (--parts=sync,cleanba for a few):

  environment           the actions of one rollout in a jitted loop, same pools: the ceiling
  policy                the rollout program without environments: observations are there at once
  rollout               the rollout program, no learning
  learner               the learner program on one stored rollout, again and again
  fused, sync, cleanba  training with the scheme; fused where the placement is one device
  conventional_rollout, conventional_sync, conventional_cleanba
                        the same with Python between any two steps (scripts/conventional.py); not of
                        losses with a replay, normalise.reward, env_batch and network.core

From these follow ratios, 1 where nothing is lost: of a rollout to the slower of environment and
policy, times 1 + 1/T, and of a round of each scheme to the slower of rollout and learner; where
they share their cores, as on a CPU, to the sum of both. Then a round of --rounds_of=cleanba (or
sync; empty: none) is taken apart (scripts/benchmark_round.py): the time of each worker by what it
did, and the memory that its programs need; --picture=round.png draws it. Peak memory of a part is
what it took at most in a call, beyond what there was before it was built, of what the C library
gives out: arrays and emulators (of a conventional part twice), not machine code, stacks and what a
GPU holds. Computed is what its programs and hand-offs need by their shapes.

Only where --parts names them: plain_learner, plain_sync, ... the same with a plain all-reduce in
place of the exact one; shards1_sync, shards2_rollout, shards4_cleanba, ... with as many pools.

All parts are built once, stay alive, and are measured in turn, round after round, each for seconds
/ rounds of a round; the others are held meanwhile, at rest. Figures are medians over the rounds: a
machine that drifts drifts for all. Of a virtual machine whose cores are now near and now far apart
(scripts/benchmark_cores.py), the rounds of one distance count; `cores_apart_ns` says which.
Compilation and the first updates are not counted. SPS counts valid agent steps. Memory must do for
a few rollouts of each part; a part makes a call at least, training two updates, `fused` two calls
(--config.placement.updates_per_call makes them shorter). A replay is kept small. Of a config whose
scheme is `apex`, which has two speeds, there are figures for `fused`, `sync` and `cleanba` with its
replay.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmark_cores
import benchmark_memory
import benchmark_parts
import benchmark_picture
import benchmark_round
from absl import flags, logging

from podracer_jit.run import build, checkpoint, command_line
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.table import SCHEMES

BASES = ('environment', 'sync', 'conventional_sync', 'conventional_cleanba')  # to divide by
# Of each part what its rounds found, and how far apart the cores were before and after.
Found = Mapping[str, Sequence[tuple[benchmark_parts.Figures, tuple[float, float]]]]


def measure(names: Sequence[str], parts: wiring.Parts, seconds: float, rounds: int
            ) -> tuple[Found, dict[str, dict[str, float]]]:
  """What was found, and of each part the MB that it took and should have."""
  found, memory, state = {name: [] for name in names}, {}, build.initial_state(parts)
  with contextlib.ExitStack() as stack:
    measures = {}
    for name in names:
      say(f'building {name}')
      base, own = benchmark_parts.of_variant(name, parts)
      before, needs = benchmark_memory.in_use(), benchmark_memory.Needs(own)
      with needs.noting():
        measures[name] = benchmark_parts.make(base, needs.parts, state, stack)
        measures[name](0.0)  # compiles what is left to compile, and warms up
      most = benchmark_memory.most_in_use(functools.partial(measures[name], 0.0))
      memory[name] = dict(peak_mb=most - before, computed_mb=needs.mb(base))
    before = benchmark_cores.apart_ns()
    for k in range(rounds):
      say(f'round {k + 1} of {rounds}')
      for name in names:
        made, after = measures[name](seconds / rounds), benchmark_cores.apart_ns()
        found[name].append((made, (before, after)))
        before = after
  return found, memory


def summarise(found: Found, unroll_length: int) -> dict[str, Any]:
  """Medians and their ratios, by part; what follows from the parts alone."""
  counted, apart_ns = benchmark_cores.comparable(found)
  sps = {name: statistics.median(x.sps for x in figures) for name, figures in counted.items()}
  period = {name: statistics.median(x.seconds_per_update for x in figures)
            for name, figures in counted.items()}
  table = {
      name: dict(sps=sps[name], seconds_per_update=period[name],
                 rounds=[x.sps for x in figures], left_out=len(found[name]) - len(figures),
                 **{f'to_{base}': sps[name] / sps[base] if base in sps else None
                    for base in BASES})
      for name, figures in counted.items()}
  return dict(parts=table, derived=ratios(period, unroll_length) | shares(sps) | dict(
      cores_apart_ns=apart_ns, rounds_left_out=sum(row['left_out'] for row in table.values())))


def ratios(period: Mapping[str, float], unroll_length: int) -> dict[str, float]:
  """Of times to the least that there could be: of the slower half, and of both one after the other.

  period: seconds an update, by part.
  """
  found = {}

  def compare(name, halves, allowed=1.0):
    if {name, *halves} <= period.keys():
      times = [period[half] for half in halves]
      found[f'{name}_to_slower_of_{"_and_".join(halves)}'] = period[name] / (allowed * max(times))
      found[f'{name}_to_sum_of_{"_and_".join(halves)}'] = period[name] / sum(times)

  # Two shards that take turns drain once a rollout.
  compare('rollout', ('environment', 'policy'), 1 + 1 / unroll_length)
  for scheme in ('fused', 'sync', 'cleanba'):
    compare(scheme, ('rollout', 'learner'))
  return found


def shares(sps: Mapping[str, float]) -> dict[str, float]:
  """Of the environment's speed."""
  derived = {}
  if {'rollout', 'learner'} <= sps.keys():
    derived['one_after_another_sps'] = 1 / (1 / sps['rollout'] + 1 / sps['learner'])
    if 'environment' in sps:
      derived['environment_share_of_rollout'] = sps['rollout'] / sps['environment']
      derived['environment_share_of_both'] = derived['one_after_another_sps'] / sps['environment']
  return derived


def describe(parts: wiring.Parts) -> dict[str, Any]:
  """Where this was measured."""
  place = parts.place
  return dict(cores=len(os.sched_getaffinity(0)), versions=checkpoint.versions(),
              actors=[str(d) for d in place.actors], learners=[str(d) for d in place.learners],
              device_kinds=sorted({d.device_kind for d in (*place.actors, *place.learners)}),
              env_threads=place.env_threads, placement=parts.config['placement'])


def show(result: Mapping[str, Any]) -> None:
  """Prints the table and what belongs to it."""
  heads = ('part', 'SPS', 'lowest', 'highest', 's/update', 'peak MB', 'computed',
           *('/ ' + base for base in BASES))
  print('  '.join(f'{head:>{max(9, len(head))}}' if i else f'{head:20}'
                  for i, head in enumerate(heads)))
  for name, row in result['parts'].items():
    ratios = [row[f'to_{base}'] for base in BASES]
    cells = [f'{row["sps"]:,.0f}', f'{min(row["rounds"]):,.0f}', f'{max(row["rounds"]):,.0f}',
             f'{row["seconds_per_update"]:.4f}', f'{row["peak_mb"]:,.1f}',
             '-' if row['computed_mb'] is None else f'{row["computed_mb"]:,.1f}',
             *('-' if ratio is None else f'{ratio:.3f}' for ratio in ratios)]
    print('  '.join([f'{name:20}', *(f'{cell:>{max(9, len(head))}}' for cell, head in
                                     zip(cells, heads[1:], strict=True))]))
  for name, value in (result['derived'] | result['machine']).items():
    print(f'{name}: {value}')


def say(line: str) -> None:
  """Tells how far it is."""
  print(line, file=sys.stderr, flush=True)


def take_apart(parts: wiring.Parts, scheme: str, picture: str | None) -> dict[str, Any]:
  """Prints, and where asked draws, what happens in a round of the scheme; returns its figures."""
  say(f'taking a round of {scheme} apart')
  found = benchmark_round.measure(parts._replace(
      scheme=SCHEMES[scheme], config=parts.config | dict(scheme=scheme)))
  print('\n'.join(benchmark_picture.table(found)))
  if picture:
    benchmark_picture.draw(found, picture)
  return dict(scheme=scheme, seconds=found.seconds, traced_seconds=found.traced_seconds,
              lanes=found.lanes, memory=found.memory)


def define_flags() -> flags.FlagValues:
  """The script's own flags, beside those of the main binary."""
  values = flags.FlagValues()
  flags.DEFINE_list('parts', None, 'What to measure; if not given, all that the config has.',
                    flag_values=values)
  flags.DEFINE_float('seconds', 60.0, 'Measured time of each part, all rounds together.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'Rounds that this time is spread over.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_enum('rounds_of', 'cleanba', ['', 'sync', 'cleanba'],
                    'The scheme of which a round is taken apart.', flag_values=values)
  flags.DEFINE_string('picture', None, 'Draw that round here (.png, .svg).', flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  return values


def left_out(parts: wiring.Parts) -> dict[str, str]:
  """The parts that this config cannot have, and why."""
  config, why = parts.config, {}
  if ('replay' in config or config['normalise']['reward'] or config['env_batch']
      or parts.network.core):
    why = dict.fromkeys(
        (name for name in benchmark_parts.NAMES if 'conventional' in name),
        'the conventional actor knows no replay, normalise.reward, env_batch or network.core')
  if config['env_batch']:
    why |= dict.fromkeys(('environment', 'policy', 'fused'),
                         'with env_batch pools are asynchronous, it wants synchronous ones')
  return why


def prepare(config: Mapping[str, Any], asked: Sequence[str] | None
            ) -> tuple[wiring.Parts, list[str]]:
  """From a config to what is shared by all parts, and which parts to measure.

  Raises:
    ValueError: in one line, as the main binary's.
  """
  for name in set(asked or ()) - set(benchmark_parts.ALL):
    raise ValueError(f'--parts: there is no {name!r}; known are {", ".join(benchmark_parts.ALL)}')
  placement.prepare_host(config['placement'])
  # Whatever the config says, training must not end while it is measured.
  parts = build.make_parts(benchmark_parts.small_replay(config)
                           | dict(scheme='sync', total_steps=2**31 - 1))
  wanted = benchmark_parts.NAMES if asked is None else asked
  names = [name for name in benchmark_parts.ALL if name in wanted]
  without = left_out(parts)
  for name in asked or ():
    if name in without:
      raise ValueError(f'--parts: there is no {name} here, {without[name]}')
  names = [name for name in names if name not in without]
  actors, learners = parts.place.actors, parts.place.learners
  if 'fused' in names and (len(actors) > 1 or actors != learners):
    say('fused: left out, the placement is more than one device')
    names.remove('fused')
  if not names:
    raise ValueError('--parts: nothing is left to measure')
  for name in names:
    benchmark_parts.of_variant(name, parts)
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
  found, memory = measure(names, parts, values.seconds, values.rounds)
  result = dict(config=parts.config, machine=describe(parts)) | summarise(
      found, parts.config['unroll_length'])
  for name, row in result['parts'].items():
    row |= memory[name]
  show(result)
  if values.rounds_of:
    result['round'] = take_apart(parts, values.rounds_of, values.picture)
  if values.json:
    Path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
