"""Which placement is fastest here: tries some for about a minute, prints the best as flags.

python scripts/tune.py --config=configs/impala_atari.py --config.env.task=Pong-v5 --seconds=60

Takes --config and its overrides as the main binary does. The last line is to be pasted after
scripts/train and the same flags; it has what differs from the config. Tried are devices of actors
and learners, (on GPUs) actors_per_device and `fused` for `sync` or the other way round, then, for
the best of these, env_threads and (of `fused`) updates_per_call: none of them changes a result of a
scheme that repeats (but a workdir keeps its scheme: with another take a new one). Never touched are
actor_platform and xla_threads, which do, nor num_shards unless asked: --num_shards=1,2,4.

Every round gives --seconds / rounds to the placements still in it, one after the other, and the
worse half is dropped; the last three rounds are of the two best. The config's own takes part in
all of them. The same training, from the same first state, runs in each. Figures are SPS, valid
agent steps, of two whole updates at least (of `fused` of two calls, which a lower
--config.placement.updates_per_call makes shorter), after those that fill the hand-offs. Once
--seconds are spent no new round begins: where an update takes many seconds, give more of them. What
is compiled and warmed up is not counted, and takes longer than what is. A replay is kept small. Not
for `apex`, which has two speeds, nor for several processes. Exit code: 0, 1 where nothing could be
measured, 2 where it could not start.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import benchmark_cores
import benchmark_parts
import jax
from absl import flags, logging
from tune_candidates import Candidate, Machine, as_flags, as_text, own_of, placed, places, vary
from tune_search import LAST_ROUNDS, Figures, Search, best, search

from podracer_jit import loops
from podracer_jit.run import build, command_line, experiment
from podracer_jit.run.metrics import Meter, Report
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import TrainState


class Tuner:
  """Trains with one placement after the other; what they can share is made once."""

  def __init__(self, config: Mapping[str, Any]):
    """Of a config that `prepare` gave."""
    self._config = config
    self._parts: dict[Candidate, wiring.Parts] = {}
    self._shared: dict[tuple[int, ...], wiring.Parts] = {}  # by learner devices
    self._state: TrainState | None = None

  def parts(self, candidate: Candidate) -> wiring.Parts:
    """Those of the candidate, with the learner programs of all that have its learner devices.

    Raises:
      ValueError: this config cannot be placed so.
    """
    if candidate not in self._parts:
      parts = build.make_parts(placed(self._config, candidate))
      shared = self._shared.setdefault(candidate.learner_devices, parts)
      own = {name: getattr(parts, name) for name in ('config', 'scheme', 'place')}
      self._parts[candidate] = shared._replace(**own)
    return self._parts[candidate]

  def measure(self, candidate: Candidate, seconds: float) -> Figures:
    """Trains for so long, in fresh environments; nothing where the device's memory will not do."""
    parts = self.parts(candidate)
    if self._state is None:
      self._state = build.initial_state(parts, replay=False)
    try:
      return train(parts, self._state, seconds)
    except loops.Stuck as error:  # nothing can end those threads, and close() would wait for them
      say(f'{error.__cause__!r}; {error}')
      os._exit(1)
    except jax.errors.JaxRuntimeError as error:
      say(f'failed: {str(error).splitlines()[0]}')
      return Figures(0.0, 0.0)


def warm_up(parts: wiring.Parts) -> int:
  """Reports after the first until hand-offs are as full as they will be."""
  scheme = parts.scheme
  if scheme.each:
    return 2 * len(parts.place.workers)
  # While the first update is compiled, actors get as far ahead as they can: by the lag, or by a
  # round in the queue and one in their hands.
  return 2 if scheme.lag is None else scheme.lag


def train(parts: wiring.Parts, state: TrainState, seconds: float) -> Figures:
  """Trains from a copy of the state (without a replay) until so many seconds were counted."""
  first, seen = warm_up(parts), []  # (time, steps)

  def report(item: Report) -> None:
    *_, (record, _) = meter.records(item)  # the statistics are part of training
    if record.get('sampled', 1):  # not while a replay is filled
      seen.append((time.perf_counter(), record['steps']))

  def stop() -> bool:
    return len(seen) > first + 1 and seen[-1][0] - seen[first][0] >= seconds

  state = benchmark_parts.copy_of(state, parts)
  with build.segment(parts, state, 0, 10**9, report, stop) as segment:
    meter = Meter(parts.config['log']['window'], parts.spec.frame_skip, segment.waits, {})
    loops.run(segment.workers)
  (start, before), (end, after) = seen[first], seen[-1]
  return Figures((after - before) / (end - start), end - start)


def show(found: Search, own: Candidate) -> None:
  """Prints the table: those of the last rounds first, by what they did in these."""
  rows = []
  for candidate in dict.fromkeys(c for figures in found.rounds for c in figures):
    final = candidate in found.last[0]
    rounds = [x for x in (found.last if final else found.rounds) if candidate in x]
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


def say(line: str) -> None:
  """Tells how far it is."""
  print(line, file=sys.stderr, flush=True)


def define_flags() -> flags.FlagValues:
  """The script's own flags, beside those of the main binary."""
  values = flags.FlagValues()
  flags.DEFINE_float('seconds', 60.0, 'Measured time, all placements together.', lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_list('num_shards', [], 'Try these too. They belong to the experiment: with another '
                    'its result is another.', flag_values=values)
  return values


def prepare(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config as it is measured: it does not end, and a replay is filled soon.

  Raises:
    ValueError: it has no single speed.
  """
  scheme = SCHEMES.get(config['scheme'])
  if scheme and scheme.free:
    raise ValueError(f'scheme: {config["scheme"]} acts and learns at rates of their own, so no one '
                     'figure says which placement is better; apex_lockstep has one')
  return benchmark_parts.small_replay(config) | dict(total_steps=2**31 - 1)


def find_machine(config: Mapping[str, Any]) -> Machine:
  """Starts JAX, with a CPU device for each core, and says what is there.

  Raises:
    ValueError: as `placement.prepare_host`.
  """
  options, cores = config['placement'], len(os.sched_getaffinity(0))
  cpus = min(cores, max(1, options['xla_threads']))
  # Where the thread pool is the same, devices that are not used cost nothing.
  placement.prepare_host(options | dict(actor_devices=(*options['actor_devices'], cpus - 1)))
  kind = jax.default_backend()
  learners = cpus if kind == 'cpu' else jax.local_device_count()
  on_cpu = options['actor_platform'] == 'cpu' or kind not in ('cpu', 'gpu')
  return Machine(cores, cpus if on_cpu else learners, learners, not on_cpu or kind == 'cpu',
                 not on_cpu and kind == 'gpu')


def accept(tuner: Tuner, candidates: Sequence[Candidate]) -> list[Candidate]:
  """Those that can be, with a word about the first, the config's own, where it cannot.

  Raises:
    ValueError: of the first, where none can.
  """
  accepted, refusals = [], {}
  for candidate in candidates:
    try:
      tuner.parts(candidate)
      accepted.append(candidate)
    except ValueError as error:
      refusals[candidate] = error
  if not accepted:
    raise refusals[candidates[0]]
  if candidates[0] in refusals:
    say(f"the config's own placement cannot be here: {refusals[candidates[0]]}")
  for shards in {c.num_shards for c in candidates} - {c.num_shards for c in accepted}:
    say(next(f'num_shards = {shards}: {error}' for c, error in refusals.items()
             if c.num_shards == shards))
  return accepted


def whole_numbers(texts: Sequence[str]) -> list[int]:
  """Of --num_shards.

  Raises:
    ValueError: one that is none, or below 1.
  """
  if not all(text.isdecimal() and int(text) for text in texts):
    raise ValueError(f'--num_shards: must be positive whole numbers, got {",".join(texts)}')
  return [int(text) for text in texts]


def run(tuner: Tuner, config: Mapping[str, Any], machine: Machine, first: Sequence[Candidate],
        seconds: float) -> Search:
  """The search, with a line on stderr for each measurement."""
  own, apart = own_of(config), []

  def measure(candidate: Candidate, seconds: float) -> Figures:
    apart.append(benchmark_cores.apart_ns())
    made = tuner.measure(candidate, seconds)
    say(f'{made.sps:10,.0f} SPS  {as_text(own, candidate)}')
    return made

  def others(candidate: Candidate) -> list[Candidate]:
    return vary(config, machine, candidate)

  say(f'{len(first)} placements, then {len(others(first[0]))} more like the best of them; '
      'compiling takes longer than measuring')
  if not experiment.repeats(config):
    say(f'{experiment.who_repeats_not(config)} takes things as they come: the result depends on '
        'their speed, and so on the placement')
  found = search(first, others, [own] if own in first else [], measure, seconds)
  if len(found.last) < LAST_ROUNDS:
    say('--seconds were spent before the last rounds: more of them would tell more')
  apart.append(benchmark_cores.apart_ns())
  if max(apart) > benchmark_cores.far(min(apart)):
    say(f'this machine moved its cores meanwhile, between {min(apart):.0f} and {max(apart):.0f} ns '
        'of each other: figures that are close do not tell which is faster')
  return found


def conclude(found: Search, own: Candidate) -> int:
  """Prints the table and, as the last line, the flags; returns the exit code."""
  show(found, own)
  chosen = best(found.last)
  if not any(figures[chosen] for figures in found.last):
    say('tune: nothing could be measured')
    return 1
  if chosen.num_shards != own.num_shards:
    print(f'num_shards = {chosen.num_shards} belongs to the experiment: its result is not that of '
          f'{own.num_shards}; the rest of the flags changes none')
  print(as_flags(own, chosen) or "the config's own placement is the fastest: no flags")
  return 0


def main(argv: Sequence[str]) -> int:
  """Runs the script; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)
  values = define_flags()
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    shards, config = whole_numbers(values.num_shards), prepare(config)
    machine, tuner = find_machine(config), Tuner(config)
    first = accept(tuner, places(config, machine, shards))
  except ValueError as error:
    print(f'tune: {error}', file=sys.stderr)
    return 2
  return conclude(run(tuner, config, machine, first, values.seconds), own_of(config))


if __name__ == '__main__':
  sys.exit(main(sys.argv))
