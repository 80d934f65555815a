"""Finds the fastest placement on this machine and prints it as flags.

  python -m benchmarks.tune --config=configs/impala_catch.py --seconds=60
  python -m benchmarks.tune --config=configs/impala_atari.py --config.env.task=Pong-v5 --seconds=300
  python -m benchmarks.tune --config=configs/ppo_atari.py --num_shards=1,2,4

The command takes --config and its overrides, like training. Its last line has the fields in which
the best placement differs from the config's own. Paste this line after `podracer_jit` and the same
flags.

The search begins with devices of actors and learners, and on GPUs actors_per_device. `sync` and
`fused` are tried in place of each other. For the best of these it tries env_threads, and for
`fused` updates_per_call. With a deterministic scheme none of them changes a result. A workdir keeps
its scheme, so another scheme needs a new workdir. actor_platform and xla_threads change results and
stay as they are. num_shards belongs to the experiment, and is tried only if --num_shards lists
values.

Each round divides its share of --seconds among the remaining placements and drops the slower half.
The last three rounds compare the two best. The config's own placement takes part in every round.
All placements train from the same first state. Figures are SPS (valid agent steps a second) of at
least two whole updates, after the updates that fill the channels; for `fused`, of two calls, which
a lower --config.placement.updates_per_call makes shorter. No new round begins once --seconds are
spent, so slow updates need more seconds. Compiling and warming up are not counted, and take longer
than the measurements. A replay is made small.

`apex` is refused, because it has two speeds. Several processes are refused, too.

Exit code: 0, 1 if nothing could be measured, 2 if it could not start.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from absl import flags

from benchmarks.common import parse_config, say
from benchmarks.tune.candidates import Candidate, as_flags, as_text, places
from benchmarks.tune.search import Search, best
from benchmarks.tune.tuner import Tuner, accept, find_machine, prepare, run


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = define_flags()
  try:
    config = parse_config(argv, values, __doc__)
    if config is None:
      return 0
    shards = whole_numbers(values.num_shards)
    experiment, own = prepare(config)
    machine = find_machine(own, experiment.placement)
    tuner = Tuner(experiment)
    first = accept(tuner, places(experiment, own, machine, shards))
  except ValueError as error:
    print(f'tune: {error}', file=sys.stderr)
    return 2
  return conclude(run(tuner, own, machine, first, values.seconds), own)


def define_flags() -> flags.FlagValues:
  """Defines the command's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_float('seconds', 60.0, 'Measured time, all placements together.', lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_list('num_shards', [], 'Also try these values. They belong to the experiment, so '
                    'its result changes with them.', flag_values=values)
  return values


def whole_numbers(texts: Sequence[str]) -> list[int]:
  """Returns the values of --num_shards.

  Raises:
    ValueError: one of them is not a positive whole number.
  """
  if not all(text.isdecimal() and int(text) for text in texts):
    raise ValueError(f'--num_shards: must be positive whole numbers, got {",".join(texts)}')
  return [int(text) for text in texts]


def show(outcome: Search, own: Candidate) -> None:
  """Prints the table; the placements of the last rounds come first, the fastest at the top."""
  rows = []
  for candidate in dict.fromkeys(c for figures in outcome.rounds for c in figures):
    final = candidate in outcome.last[0]
    rounds = [x for x in (outcome.last if final else outcome.rounds) if candidate in x]
    sps = [x[candidate] for x in rounds]
    ratios = [x[candidate] / x[own] for x in rounds if x.get(own)]
    rows.append((final, statistics.median(sps), as_text(own, candidate), sps,
                 f'{statistics.median(ratios):.3f}' if ratios else '-'))
  rows.sort(key=lambda row: row[:2], reverse=True)
  width = max(len(row[2]) for row in rows)
  print(f'{"placement":{width}}        SPS     lowest    highest  / own  rounds')
  for _, median, text, sps, ratio in rows:
    print(f'{text:{width}} {median:10,.0f} {min(sps):10,.0f} {max(sps):10,.0f} {ratio:>6} '
          f'{len(sps):7}')


def conclude(outcome: Search, own: Candidate) -> int:
  """Prints the table and, as the last line, the flags; returns the exit code."""
  show(outcome, own)
  chosen = best(outcome.last)
  if not any(figures[chosen] for figures in outcome.last):
    say('tune: nothing could be measured')
    return 1
  if chosen.num_shards != own.num_shards:
    print(f'num_shards = {chosen.num_shards} belongs to the experiment: its result is not that of '
          f'{own.num_shards}; the rest of the flags changes none')
  print(as_flags(own, chosen) or "the config's own placement is the fastest: no flags")
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
