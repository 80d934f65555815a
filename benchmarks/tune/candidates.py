"""Placements that `benchmarks.tune` tries, and their flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from podracer_jit.experiment.resolve import changed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime.placement import PlacementOptions
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES


class Candidate(NamedTuple):
  """A placement, with the two other fields that `tune` varies: num_shards and scheme."""

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


def own_of(experiment: Experiment, config_place: PlacementOptions | None = None) -> Candidate:
  """Returns the placement of an experiment, or else its config's placement."""
  place = config_place or experiment.placement
  return Candidate(*(getattr(place, name) for name in Candidate._fields[:-2]),
                   experiment.num_shards, experiment.scheme_name)


def placed(experiment: Experiment, candidate: Candidate) -> Experiment:
  """Returns the experiment with this placement.

  Raises:
    ValueError: the experiment does not allow this placement.
  """
  place = candidate._asdict()
  fields = {name: place.pop(name) for name in NOT_PLACEMENT}
  return changed(experiment, **fields, placement=place)


def places(experiment: Experiment, own: Candidate, machine: Machine,
           num_shards: Sequence[int] = ()) -> list[Candidate]:
  """Returns the placements to try, the config's own first; `accept` drops impossible ones.

  Learners get the first devices. So all placements with the same number of learners share the
  learner program, which takes longest to compile. `sync` and `fused` give the same bits, so both
  are tried if the config has one of them.

  Args:
    experiment: the experiment, whose results must not depend on the placement.
    own: the config's own placement.
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
  if own.scheme == 'sync':
    # A call begins with one update, since an update of some configs takes many seconds.
    candidates += [candidate._replace(scheme='fused', updates_per_call=1)
                   for candidate in candidates]
  elif own.scheme == 'fused':
    candidates += [candidate._replace(scheme='sync') for candidate in candidates]
  return list(dict.fromkeys(candidates))


def _actors(scheme: Scheme, machine: Machine, learners: tuple[int, ...], shares: float
            ) -> Iterator[tuple[int, ...]]:
  """Yields actor devices for these learners.

  Args:
    scheme: the scheme of the candidate.
    machine: the devices to choose from.
    learners: the candidate's learner devices.
    shares: environment shards, divided by the actors of a device; the number of actor devices
      divides it.
  """
  if scheme.colocated:
    yield learners
    return
  first = max(learners) + 1
  for count in _divisors(shares, machine.actors):
    yield tuple(range(count))
    # With lag 0 actors and learner take turns, so separate devices would gain nothing.
    if machine.shared and scheme.lag != 0 and first + count <= machine.actors:
      yield tuple(range(first, first + count))


def _learners(experiment: Experiment, own: Candidate, machine: Machine
              ) -> list[tuple[int, ...]]:
  """Returns the learner devices that give the same result as the config's own."""
  workers = len(own.learner_devices)
  if experiment.scheme.each:
    # Each worker makes updates of its own, so the result depends on their number.
    return [tuple(i for i in range(n) for _ in range(workers // n))
            for n in _divisors(workers, machine.learners)]
  if not experiment.exact_reduce:
    # Each device has one gradient group, so the result depends on their number.
    return [tuple(range(workers))] if 0 < workers <= machine.learners else []
  return [tuple(range(n)) for n in _divisors(experiment.num_grad_shards, machine.learners)]


def _divisors(whole: float, most: int) -> list[int]:
  """Returns the numbers from 1 to `most` that divide `whole`; none if it is not an integer."""
  return [n for n in range(1, most + 1) if n <= whole and whole % n == 0]


def vary(experiment: Experiment, machine: Machine, candidate: Candidate) -> list[Candidate]:
  """Returns the same devices with other env_threads and, for `fused`, other updates_per_call."""
  pools = candidate.num_shards
  calls = candidate.updates_per_call
  shared = max(1, machine.cores // pools)  # env_threads = 0 means this number
  most = experiment.env.num_envs // pools
  threads = {min(n, most) for n in (1, shared, machine.cores, 2 * machine.cores)}
  threads -= {candidate.env_threads or shared}
  variants = [candidate._replace(env_threads=n) for n in sorted(threads)]
  # A user's own scheme is not in SCHEMES, but only the experiment's scheme can be one.
  own = candidate.scheme == experiment.scheme_name
  scheme = experiment.scheme if own else SCHEMES[candidate.scheme]
  if scheme.graph.one_program:
    variants += [candidate._replace(updates_per_call=n)
                 for n in sorted({max(1, calls // 4), calls * 4} - {calls})]
  return variants


def _differing(own: Candidate, chosen: Candidate) -> dict[str, str]:
  """Returns the fields in which a candidate differs from the config's own, as flags' values."""
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
