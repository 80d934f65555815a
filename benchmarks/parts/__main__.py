"""Measures the speed of each part of an experiment on this machine, and splits a round's time.

  python -m benchmarks.parts --config=configs/impala_catch.py --seconds=10
  python -m benchmarks.parts --config=configs/impala_atari.py --parts=sync,cleanba --json=out.json
  python -m benchmarks.parts --config=configs/pong_laptop.py --picture=round.png

The command takes --config and its overrides, like training. It ignores the config's scheme, since
each part has its own. The parts are (--parts selects some of them):

  environment           environments alone, with the actions of one rollout: the ceiling
  policy                the rollout program without environments; observations need no waiting
  rollout               the rollout program, without learning
  learner               the learner program, repeatedly on one stored rollout
  fused, sync, cleanba  training with the scheme; fused only if the placement is one device
  conventional_rollout, conventional_sync, conventional_cleanba
                        the same with Python between any two steps of an environment; not with a
                        replay, normalise.reward, env_batch or network.core

Further parts are measured only if --parts names them: plain_learner, plain_sync, ... with a plain
all-reduce instead of the exact sum; shards1_sync, shards2_rollout, shards4_cleanba, ... with 1, 2
or 4 vector environments.

Ratios below the table are 1 if nothing is lost: the time of a rollout over the slower of
environment and policy (times 1 + 1/T), and the time of a scheme's round over the slower of rollout
and learner. If the halves share their cores, as on a CPU, compare with the ratio to their sum.

Then a round of --rounds_of=cleanba (or sync; empty for none) is split into the activities of each
worker, and the memory that its programs need. --picture draws it, which needs matplotlib.

*Peak memory* is the largest heap during a call of the part, minus the heap before it was built. It
includes arrays and emulators (twice for a conventional part), but no machine code, no stacks and no
GPU memory. *Computed memory* is the size of the part's programs and channels, from their shapes.

All parts are built first and stay alive. In every round each part is measured for seconds / rounds,
while the others rest, so a change of the machine's speed affects all parts. Figures are medians
over the rounds. On virtual machines the distance between cores changes; only rounds of one distance
count, which cores_apart_ns shows. Compiling and the first updates are not counted. SPS counts valid
agent steps. A part makes at least one call; training makes two updates, and `fused` two calls,
which --config.placement.updates_per_call makes shorter. A replay is made small. A config with the
scheme `apex`, which has two speeds, is measured with `fused`, `sync` and `cleanba`.

Exit code: 0, 2 if it could not start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks.common import parse_config, say
from benchmarks.parts import picture, rounds, timed_parts
from benchmarks.parts.segments import small_replay, with_scheme
from benchmarks.parts.summary import BASES, describe, measure, summarise
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.families import family_of
from podracer_jit.experiment import build, memory
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.parts import user_path
from podracer_jit.runtime import host


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = define_flags()
  try:
    config = parse_config(argv, values, __doc__)
    if config is None:
      return 0
    if values.picture and not picture.can_draw():
      raise ValueError('--picture: drawing needs matplotlib: pip install matplotlib')
    run, names = prepare(resolve(config), values.parts)
  except ValueError as error:
    print(f'parts: {error}', file=sys.stderr)
    return 2
  measurements, memory = measure(names, run, values.seconds, values.rounds)
  result = dict(config=run.experiment.fields, machine=describe(run)) | summarise(
      measurements, run.experiment.unroll_length)
  for name, row in result['parts'].items():
    row |= memory[name]
  show(result)
  if values.rounds_of:
    path = values.picture and str(user_path(values.picture))
    result['round'] = split_round(run, values.rounds_of, path)
  if values.json:
    user_path(values.json).write_text(json.dumps(result, indent=2) + '\n')
  return 0


def define_flags() -> flags.FlagValues:
  """Defines the command's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_list('parts', None, 'Parts to measure; default: all parts of the config.',
                    flag_values=values)
  flags.DEFINE_float('seconds', 60.0, 'Measured time of each part, in all rounds together.',
                     lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'Rounds that share this time.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_enum('rounds_of', 'cleanba', ['', 'sync', 'cleanba'],
                    'The scheme whose round is split into parts; empty: none.', flag_values=values)
  flags.DEFINE_string('picture', None, 'A file for a picture of that round (.png, .svg).',
                      flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  return values


def left_out(experiment: Experiment) -> dict[str, str]:
  """Returns the reason for each part that cannot be measured with this config."""
  reasons = {}
  if (experiment.algorithm.learns_from_replay or experiment.normalise.reward
      or experiment.env_batch or experiment.algorithm.initial_carry(1) is not None
      or family_of(experiment.env.task) is not envpool_envs):
    reasons = dict.fromkeys(
        (name for name in timed_parts.NAMES if 'conventional' in name),
        'the conventional actor supports no replay, normalise.reward, env_batch, carry '
        '(network.core) or environments outside of EnvPool')
  if experiment.env_batch:
    reasons |= dict.fromkeys(('environment', 'policy', 'fused'),
                             'env_batch makes pools asynchronous, and it needs synchronous ones')
  return reasons


def prepare(experiment: Experiment, parts: Sequence[str] | None) -> tuple[build.Run, list[str]]:
  """Returns the run that all parts share, and the names of the parts to measure.

  Args:
    experiment: the experiment of the config.
    parts: names of --parts; None for all.

  Raises:
    ValueError: the config or a part cannot be measured.
  """
  for name in set(parts or ()) - set(timed_parts.ALL):
    raise ValueError(f'--parts: there is no {name!r}; known are {", ".join(timed_parts.ALL)}')
  host.prepare_host(experiment.placement)
  # Training must not end while it is measured.
  experiment = changed(experiment, scheme='sync', total_steps=2**30,
                       env=dict(renew_every_updates=0), **small_replay(experiment))
  run = build.make_run(experiment)
  for warning in memory.check(run):
    say(f'warning: {warning}')
  selected = timed_parts.NAMES if parts is None else parts
  names = [name for name in timed_parts.ALL if name in selected]
  reasons = left_out(experiment)
  for name in parts or ():
    if name in reasons:
      raise ValueError(f'--parts: {name} cannot be measured: {reasons[name]}')
  names = [name for name in names if name not in reasons]
  actors = run.place.actors
  if 'fused' in names and (len(actors) > 1 or actors != run.place.learners):
    say('fused: left out, the placement is more than one device')
    names.remove('fused')
  if not names:
    raise ValueError('--parts: nothing is left to measure')
  for name in names:
    timed_parts.of_variant(name, run)
  return run, names


def show(result: Mapping[str, Any]) -> None:
  """Prints the table, the figures derived from it, and the machine."""
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


def split_round(run: build.Run, scheme: str, path: str | None) -> dict[str, Any]:
  """Splits a round into parts, prints them and draws them.

  Args:
    run: the run of the experiment.
    scheme: the scheme whose round is split.
    path: a file for the picture, or None.

  Returns:
    The figures of the round.
  """
  say(f'splitting a round of {scheme} into parts')
  measured = rounds.measure(with_scheme(run, scheme))
  print('\n'.join(picture.table(measured)))
  if path:
    picture.draw(measured, path)
  return dict(scheme=scheme, seconds=measured.seconds, traced_seconds=measured.traced_seconds,
              lanes=measured.lanes, memory=measured.memory)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
