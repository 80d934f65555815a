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

Each part is measured as soon as it is built, and its speed is printed. All parts stay alive: in
every further round each part is measured again for seconds / rounds, while the others rest, so a
change of the machine's speed affects all parts. Figures are medians over the rounds. On virtual
machines the distance between cores changes; only rounds of one distance count, which cores_apart_ns
shows. Compiling and the first updates are not counted. SPS counts valid agent steps. A part makes
at least one call; training makes two updates, and `fused` two calls, which
--config.placement.updates_per_call makes shorter. A replay is made small. A config with the scheme
`apex`, which has two speeds, is measured with `fused`, `sync` and `cleanba`.

Without --seconds the command ends within a minute: a part is measured for 3 seconds, and parts that
are not measured in time are named. SIGINT and SIGTERM end the command at once; it prints what it
has, and writes it to --json.

Exit code: 0, 2 if it could not start, 128 and the number of the signal that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from benchmarks.common import parse_config, say
from benchmarks.parts import picture, rounds, timed_parts
from benchmarks.parts.segments import small_replay, with_scheme
from benchmarks.parts.summary import BASES, Measured, describe, measure
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.families import family_of
from podracer_jit.experiment import build, memory
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.parts import user_path
from podracer_jit.runtime import host

LIMIT_S = 50.0  # of the command without --seconds; imports take some seconds before
DEFAULT_S = 3.0  # of each part then


class Interrupted(Exception):  # noqa: N818 - control flow
  """A signal came.

  Attributes:
    code: the exit code.
  """

  def __init__(self, number: int, _: Any):
    """Raised by the handler of a signal."""
    super().__init__(f'interrupted by {signal.Signals(number).name}')
    self.code = 128 + number


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  start = time.monotonic()
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
  measured = Measured()

  def work() -> None:
    seconds = DEFAULT_S if values.seconds is None else values.seconds
    measure(names, run, seconds, values.rounds, measured)
    if values.rounds_of:
      say(f'splitting a round of {values.rounds_of} into parts')
      measured.round = rounds.measure(with_scheme(run, values.rounds_of))

  limit_s = None if values.seconds is not None else start + LIMIT_S - time.monotonic()
  try:
    code, ending = ended(work, limit_s)
  finally:  # what was measured is kept
    finish(values, run, measured)
  if ending is None:
    return code
  missing = [name for name in names if name not in measured.rounds]
  if values.rounds_of and not measured.round:
    missing.append(f'the round of {values.rounds_of}')
  say(f'parts: {ending}; not measured: {", ".join(missing) or "further rounds"}')
  # The thread may be in the middle of a program, and nothing can be closed before that ends.
  sys.stdout.flush()
  os._exit(code)


def ended(work: Callable[[], None], limit_s: float | None) -> tuple[int, str | None]:
  """Runs `work` on a thread until it is over, a signal comes, or the time is over.

  Args:
    work: what to do.
    limit_s: how long it may take; None: as long as it takes.

  Returns:
    The exit code, and why the work was left before its end; None if it was not.
  """
  failures: list[BaseException] = []

  def caught() -> None:
    try:
      work()
    except BaseException as error:  # noqa: BLE001 - raised again by the main thread
      failures.append(error)

  # The main thread waits, so that signals and the clock end the command in any program.
  thread = threading.Thread(target=caught, daemon=True)
  previous = {number: signal.signal(number, _interrupt)
              for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    thread.start()
    thread.join(limit_s)
  except Interrupted as interrupted:
    return interrupted.code, str(interrupted)
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
  if thread.is_alive():
    return 0, 'a minute is over (--seconds and --parts take as long as they need)'
  if failures:
    raise failures[0]
  return 0, None


def _interrupt(number: int, frame: Any) -> None:
  raise Interrupted(number, frame)


def finish(values: flags.FlagValues, run: build.Run, measured: Measured) -> None:
  """Prints what was measured, and writes the files.

  Args:
    values: the command's own flags.
    run: the run of the experiment.
    measured: the measurements.
  """
  result = dict(config=run.experiment.fields, machine=describe(run), parts={})
  if measured.rounds:
    result |= measured.result(run.experiment.unroll_length)
    show(result)
  if measured.round:
    result['round'] = show_round(measured.round, values.rounds_of)
    if values.picture:
      picture.draw(measured.round, str(user_path(values.picture)))
  if values.json:
    user_path(values.json).write_text(json.dumps(result, indent=2) + '\n')


def define_flags() -> flags.FlagValues:
  """Defines the command's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_list('parts', None, 'Parts to measure; default: all parts of the config.',
                    flag_values=values)
  flags.DEFINE_float('seconds', None, 'Measured time of each part, in all rounds together; '
                     'default: the command ends within a minute.',
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
  host.prepare_host(experiment.placement, experiment.numerics.deterministic)
  # Training must not end while it is measured.
  own_scheme = experiment.scheme_name
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
  return run, in_order(names, own_scheme)


def in_order(names: Sequence[str], own_scheme: str) -> list[str]:
  """Returns the parts with `fused` before other schemes if it is the config's own.

  Otherwise it comes after them, as in `timed_parts.ALL`: its calls are long, and the time may be
  over before.
  """
  if own_scheme != 'fused' or 'fused' not in names:
    return list(names)
  others = [name for name in names if name != 'fused']
  first = next((i for i, name in enumerate(others) if name in ('sync', 'cleanba')), len(others))
  return [*others[:first], 'fused', *others[first:]]


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


def show_round(measured: rounds.Round, scheme: str) -> dict[str, Any]:
  """Prints the parts of a round of a scheme, and returns its figures."""
  print('\n'.join(picture.table(measured)))
  return dict(scheme=scheme, seconds=measured.seconds, traced_seconds=measured.traced_seconds,
              lanes=measured.lanes, memory=measured.memory)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
