"""The placements that `podracer_jit tune` tries, and how they are written as flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from podracer_jit.run.experiment import Experiment
from podracer_jit.run.resolve import changed
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES


class Candidate(NamedTuple):
  """A placement, with the two fields of the experiment that limit which ones are possible."""

  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  actors_per_device: int
  env_threads: int
  updates_per_call: int
  num_shards: int
  scheme: str


NOT_PLACEMENT = Candidate._fields[-2:]


class Machine(NamedTuple):
  """The devices to choose from."""

  cores: int
  actors: int  # devices for actors
  learners: int  # devices for learners
  shared: bool  # actors and learners have the same devices
  gpu: bool  # actors run on GPUs


def own_of(experiment: Experiment, asked: PlacementOptions | None = None) -> Candidate:
  """Returns the placement of an experiment, or the one that its config asked for."""
  place = asked or experiment.placement
  return Candidate(*(getattr(place, name) for name in Candidate._fields[:-2]),
                   experiment.num_shards, experiment.scheme_name)


def placed(experiment: Experiment, candidate: Candidate) -> Experiment:
  """Returns the experiment with this placement.

  Raises:
    ValueError: it cannot have it.
  """
  fields = candidate._asdict()
  rest = {name: fields.pop(name) for name in NOT_PLACEMENT}
  return changed(experiment, **rest, placement=fields)


def places(experiment: Experiment, own: Candidate, machine: Machine,
           num_shards: Sequence[int] = ()) -> list[Candidate]:
  """Returns the devices worth trying, the config's own first; `accept` drops impossible ones.

  Where learners have devices of their own, these are the first devices. So all placements with the
  same number of learners share the learner program, which takes longest to compile. `sync`
  and `fused`, which give the same bits, are tried in place of each other.

  Args:
    experiment: whose results must stay the same, whatever its placement.
    own: the placement that its config asks for.
    machine: the devices to choose from.
    num_shards: other values to try.
  """
  scheme = experiment.scheme
  candidates = [own]
  for shards in dict.fromkeys((own.num_shards, *num_shards)):
    for per_device in (1, 2, 4) if machine.gpu else (1,):
      for learners in _learners(experiment, own, machine):
        candidates += [
            own._replace(actor_devices=actors, learner_devices=learners, num_shards=shards,
                         actors_per_device=per_device)
            for actors in _actors(scheme, machine, learners, shards / per_device)]
  if own.scheme == 'sync':  # one update a call to begin with: some configs' takes many seconds
    candidates += [candidate._replace(scheme='fused', updates_per_call=1)
                   for candidate in candidates]
  elif own.scheme == 'fused':
    candidates += [candidate._replace(scheme='sync') for candidate in candidates]
  return list(dict.fromkeys(candidates))


def _actors(scheme: Scheme, machine: Machine, learners: tuple[int, ...], shares: float
            ) -> Iterator[tuple[int, ...]]:
  """Yields actor devices for these learners; their number divides `shares`."""
  if scheme.colocated:
    yield learners
    return
  first = max(learners) + 1
  for count in _divisors(shares, machine.actors):
    yield tuple(range(count))
    # With lag 0 one always waits for the other, so devices of their own would gain nothing.
    if machine.shared and scheme.lag != 0 and first + count <= machine.actors:
      yield tuple(range(first, first + count))


def _learners(experiment: Experiment, own: Candidate, machine: Machine
              ) -> list[tuple[int, ...]]:
  """Returns the learner devices that give the same result as the config's own."""
  workers = len(own.learner_devices)
  if experiment.scheme.each:  # an update is of one worker, so their number stays
    return [tuple(i for i in range(n) for _ in range(workers // n))
            for n in _divisors(workers, machine.learners)]
  if not experiment.exact_reduce:  # a gradient group for each device
    return [tuple(range(workers))] if 0 < workers <= machine.learners else []
  return [tuple(range(n)) for n in _divisors(experiment.num_grad_shards, machine.learners)]


def _divisors(whole: float, most: int) -> list[int]:
  return [n for n in range(1, most + 1) if n <= whole and whole % n == 0]


def vary(experiment: Experiment, machine: Machine, candidate: Candidate) -> list[Candidate]:
  """Returns the same devices with other env_threads and, for `fused`, other updates_per_call."""
  pools, calls = candidate.num_shards, candidate.updates_per_call
  shared = max(1, machine.cores // pools)  # what env_threads = 0 stands for
  most = experiment.env.num_envs // pools
  threads = {min(n, most) for n in (1, shared, machine.cores, 2 * machine.cores)}
  threads -= {candidate.env_threads or shared}
  variants = [candidate._replace(env_threads=n) for n in sorted(threads)]
  # Of the schemes that are tried, only the experiment's own may be one of a user.
  own = candidate.scheme == experiment.scheme_name
  scheme = experiment.scheme if own else SCHEMES[candidate.scheme]
  if scheme.graph.one_program:
    variants += [candidate._replace(updates_per_call=n)
                 for n in sorted({max(1, calls // 4), calls * 4} - {calls})]
  return variants


def _differing(own: Candidate, chosen: Candidate) -> dict[str, str]:
  return {name: str(value).replace(' ', '') for name, value in chosen._asdict().items()
          if value != getattr(own, name)}


def as_flags(own: Candidate, chosen: Candidate) -> str:
  """Returns the flags of a placement, quoted for a shell; empty for the config's own."""
  return shlex.join(f'--config.{"" if name in NOT_PLACEMENT else "placement."}{name}={value}'
                    for name, value in _differing(own, chosen).items())


def as_text(own: Candidate, candidate: Candidate) -> str:
  """Returns the fields in which a candidate differs from the config's own, as text."""
  differing = _differing(own, candidate)
  return ' '.join(f'{name}={value}' for name, value in differing.items()) or "the config's own"
