"""Placements that `benchmarks.tune` tries, and their flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from podracer_jit.experiment.resolve import changed
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime.machine import Machine
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES

# Schemes that give the same bits, and differ in what runs at once.
ALIKE = ('sync', 'fused')


class Candidate(NamedTuple):
  """A placement, all of whose fields are set, and the scheme."""

  scheme: str
  actor_devices: tuple[int, ...]
  learner_devices: tuple[int, ...]
  actors_per_device: int
  env_threads: int
  updates_per_call: int
  xla_threads: int

  def flags(self, shipped: str) -> list[str]:
    """Returns the flags that give it, beside those of a config with the scheme `shipped`."""
    scheme = [f'--config.scheme={self.scheme}'] if self.scheme != shipped else []
    return scheme + [f'--config.placement.{name}={value}'.replace(' ', '')
                     for name, value in self._asdict().items() if name != 'scheme']


def of(experiment: Experiment) -> Candidate:
  """Returns the placement of an experiment."""
  return Candidate(experiment.scheme_name, *(
      getattr(experiment.placement, name) for name in Candidate._fields[1:]))


def _placed(experiment: Experiment, scheme: str, **fields: Any) -> Candidate | None:
  """Returns a placement, whose other fields the rule chooses; None if it is impossible."""
  try:
    return of(changed(experiment, scheme=scheme, placement=fields))
  except ValueError:
    return None


def _all_placed(experiment: Experiment, wanted: Iterable[Mapping[str, Any]]) -> list[Candidate]:
  """Returns the possible ones of some placements, each once."""
  placed = (_placed(experiment, **fields) for fields in wanted)
  return list(dict.fromkeys(candidate for candidate in placed if candidate))


def places(experiment: Experiment, machine: Machine) -> list[Candidate]:
  """Returns the placements that differ in their devices, that of the experiment first.

  `sync` and `fused` give the same bits, so both are tried if the experiment has one of them.

  Args:
    experiment: the experiment, whose results must not depend on the placement.
    machine: the devices to choose from.
  """
  schemes = ALIKE if experiment.scheme_name in ALIKE else (experiment.scheme_name,)
  own = of(experiment)
  others = []
  for scheme in schemes:
    with contextlib.suppress(ValueError):  # the experiment cannot have this scheme
      of_scheme = changed(experiment, scheme=scheme)
      others += _all_placed(of_scheme, (
          dict(scheme=scheme, actors_per_device=per_device, actor_devices=actors,
               learner_devices=learners)
          for per_device in ((1, 2, 4) if machine.gpus else (1,))
          for learners in _learners(of_scheme, machine)
          for actors in _actors(of_scheme, machine, learners, per_device)))
  return [own, *(candidate for candidate in others if candidate != own)]


def _learners(experiment: Experiment, machine: Machine) -> list[tuple[int, ...]]:
  """Returns the learner devices that give the same result as the experiment's own."""
  most = machine.gpus or machine.cores
  own = experiment.placement.learner_devices
  if experiment.scheme.each:
    # Each worker makes updates of its own, so the result depends on their number.
    return [tuple(i for i in range(n) for _ in range(len(own) // n))
            for n in _divisors(len(own), most)]
  if not experiment.exact_reduce:
    # Each device has one gradient group, so the result depends on their number.
    return [own]
  return [tuple(range(n)) for n in _divisors(experiment.num_grad_shards, most)]


def _actors(experiment: Experiment, machine: Machine, learners: tuple[int, ...], per_device: int
            ) -> Iterator[tuple[int, ...]]:
  """Yields actor devices for these learners.

  Args:
    experiment: the experiment.
    machine: the devices to choose from.
    learners: the learner devices.
    per_device: actors of a device.
  """
  scheme: Scheme = experiment.scheme
  if scheme.colocated or scheme.alone or scheme.graph.one_program:
    yield learners
    return
  on_gpus = machine.gpus and experiment.placement.actor_platform != 'cpu'
  most = machine.gpus if on_gpus else machine.cores
  first = max(learners) + 1
  for count in _divisors(experiment.num_shards // per_device, most):
    yield tuple(range(count))
    # With lag 0 actors and learner take turns, so separate devices would gain nothing.
    if scheme.lag != 0 and first + count <= most and bool(on_gpus) == bool(machine.gpus):
      yield tuple(range(first, first + count))


def _divisors(whole: int, most: int) -> list[int]:
  """Returns the numbers from 1 to `most` that divide `whole`."""
  return [n for n in range(1, most + 1) if n <= whole and whole % n == 0]


def variants(experiment: Experiment, machine: Machine, candidate: Candidate) -> list[Candidate]:
  """Returns a placement, and those that differ from it in one number.

  Args:
    experiment: the experiment.
    machine: the cores.
    candidate: the placement.
  """
  cores = machine.cores
  width = experiment.env.num_envs // experiment.num_shards
  values = dict(xla_threads={max(2, n) for n in (cores, 2 * cores, 8 * cores)} | {2})
  if not experiment.spec.is_function:
    values['env_threads'] = {min(width, n) for n in (
        1, max(1, cores // experiment.num_shards), cores, 2 * cores)}
  if SCHEMES.get(candidate.scheme, experiment.scheme).graph.one_program:
    calls = candidate.updates_per_call
    values['updates_per_call'] = {max(1, calls // 4), calls, 4 * calls}
  fields = candidate._asdict()
  others = _all_placed(experiment, ({**fields, name: value} for name, numbers in values.items()
                                    for value in sorted(numbers)))
  return [candidate, *(other for other in others if other != candidate)]
