"""The placement that an experiment gets on a machine, where its config leaves it open.

With a deterministic scheme, a placement changes no bit of the result; on GPUs and TPUs only if the
number of learner devices stays. So it can be chosen by a rule, and anew at each start. The rule is
a pure function of the experiment and a described machine. Its figures were measured on one and two
cores; for more cores, GPUs and TPUs it extends them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from podracer_jit.envs.families import may_start_jax
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime.machine import Machine
from podracer_jit.runtime.placement import PlacementOptions

# What fields are without a rule (`placement.auto = False`); `env_threads` follows from the cores.
FIXED = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1, updates_per_call=16,
             xla_threads=2)
# Numbers that an update reads, from which on several devices share it: two devices of a CPU take
# 0.2 ms to meet. The size of the network does not count: XLA's threads share its products anyway,
# and two devices were 0.83, 0.89, 1.06 times as fast as one with MLPs of 64, 256, 1,024 units.
_NUMBERS_OF_A_DEVICE = 1_000_000
# Seconds that environments keep a thread busy in each step; less is not worth waking it up.
_THREAD_S = 150e-6
# Seconds that a row takes in a small network with its gradient, and a number in a convolution.
_ROW_S = 1e-6
_NUMBER_S = 7e-9
# Seconds that a call of updates takes, about: with a quarter of them, `ppo_cartpole` is 0.91 times
# as fast. A signal ends a run after a call.
_CALL_S = 0.25
_MOST_UPDATES_PER_CALL = 64
_MOST_XLA_THREADS = 16
# Rows whose activations fit a core's cache: of observations of _LARGE_OBS numbers or more, such as
# frames, and of smaller ones.
_LARGE_OBS = 4096
_ROWS_OF_LARGE, _ROWS_OF_SMALL = 64, 4096


def placed(experiment: Experiment, machine: Machine, processes: int = 1) -> PlacementOptions:
  """Returns the placement of an experiment on a machine.

  Args:
    experiment: with the placement of its config.
    machine: that it runs on, or what each of its machines has.
    processes: of the run.

  Returns:
    The placement. Fields that the config sets are as they are; `chosen` names the others.
  """
  given = experiment.placement
  fields = given.open_fields
  if not experiment.scheme.graph.one_program:
    # These have no calls of several updates.
    given = dataclasses.replace(given, updates_per_call=given.updates_per_call or 1)
    fields = given.open_fields
  if not (given.auto and not given.is_remote):
    chosen: dict[str, Any] = FIXED | _following(experiment)
  else:
    chosen = _devices(experiment, machine, processes)
    place = _with(given, {name: chosen[name] for name in chosen if name in fields})
    chosen |= _threads(experiment, machine, processes, place)
  return dataclasses.replace(
      _with(given, {name: chosen[name] for name in fields if name in chosen}),
      chosen=tuple(name for name in fields if name in chosen))


def _following(experiment: Experiment) -> dict[str, Any]:
  """Returns devices that must be like those that the config sets, without a rule."""
  given = experiment.placement
  scheme = experiment.scheme
  are_equal = scheme.alone or scheme.colocated or scheme.graph.one_program
  if given.learner_devices and (are_equal or scheme.each):
    return dict(actor_devices=given.learner_devices)
  if given.actor_devices and are_equal:
    return dict(learner_devices=given.actor_devices)
  return {}


def _with(given: PlacementOptions, chosen: dict[str, Any]) -> PlacementOptions:
  return dataclasses.replace(given, **chosen)


def _devices(experiment: Experiment, machine: Machine, processes: int) -> dict[str, Any]:
  """Returns the devices of actors and learners."""
  given = experiment.placement
  scheme = experiment.scheme
  # Rates that are tied to each other allow some numbers of actors only, so this number must not
  # follow the load: a run that was accepted goes on beside others, too.
  cores = machine.allowed if scheme.graph.free_rates else machine.cores
  cores = min(cores, machine.devices or cores)
  learner_units = machine.accelerators or cores
  # A TPU cannot call simulators outside of the program.
  is_on_cpu = given.actor_platform == 'cpu' or not machine.gpus and not experiment.spec.is_function
  actor_units = cores if is_on_cpu else learner_units
  # A small update takes less time than several devices need to meet.
  if not machine.accelerators and _numbers(experiment) < _NUMBERS_OF_A_DEVICE:
    learner_units = actor_units = 1
  shards = max(1, experiment.num_shards // processes)
  groups = experiment.num_grad_shards
  if experiment.replay is not None:
    # Each learner stores an equal number of environments.
    groups = math.gcd(groups, experiment.env.num_envs)
  groups = max(1, groups // processes)
  if _is_alone(experiment) or scheme.each or not experiment.exact_reduce:
    # The scheme has one device, or its results depend on the number of learner devices.
    learners = 1
  elif scheme.graph.one_program:
    learners = _divisor(math.gcd(shards, groups), learner_units)
  else:
    learners = _divisor(groups, learner_units)
  learner_devices = given.learner_devices or tuple(range(learners))
  per_device = given.actors_per_device or 1
  if scheme.alone or scheme.colocated or scheme.graph.one_program:
    actor_devices = learner_devices
  elif experiment.env_batch:
    # Each actor has one pool.
    per_device = given.actors_per_device or max(
        1, shards // (len(given.actor_devices) or _divisor(shards, actor_units)))
    actor_devices = tuple(range(_divisor(shards, shards // per_device)))
  else:
    # Workers that compute gradients by themselves have as many actors each.
    unit = len(learner_devices) if scheme.each else 1
    actor_devices = tuple(range(_divisor(shards // per_device, actor_units, unit)))
  if given.actor_devices and 'learner_devices' in given.open_fields and (
      scheme.alone or scheme.colocated or scheme.graph.one_program):
    learner_devices = given.actor_devices
  return dict(actor_devices=actor_devices, learner_devices=learner_devices,
              actors_per_device=per_device)


def microbatch_rows(spec: EnvSpec, machine: Machine) -> int:
  """Returns the number that `microbatch_rows` = -1 stands for on a machine.

  Results depend on it, so a run keeps the number that it began with; see `opening.as_it_began`.
  """
  if machine.accelerators:
    return 0
  return _ROWS_OF_LARGE if math.prod(spec.obs_shape) >= _LARGE_OBS else _ROWS_OF_SMALL


def most_devices(num_shards: int, num_grad_shards: int, machine: Machine) -> int:
  """Returns the most CPU devices that a process may be given on a machine."""
  return max(1, min(machine.allowed, max(num_shards, num_grad_shards)))


def xla_threads(machine: Machine) -> int:
  """Returns the threads of XLA for updates that are not small.

  They do not follow the load: programs of other numbers of threads are compiled anew.
  """
  return max(2, min(machine.allowed, _MOST_XLA_THREADS))


def alternatives(experiment: Experiment, devices: int) -> list[PlacementOptions]:
  """Returns other placements that may be as fast, of which only the devices differ.

  Args:
    experiment: with its placement; devices that its config sets are kept.
    devices: of this process.
  """
  place = experiment.placement
  scheme = experiment.scheme
  is_open = {'actor_devices', 'learner_devices'} & set(place.chosen)
  if (place.is_remote or _is_alone(experiment) or scheme.each or not experiment.exact_reduce
      or experiment.env_batch):
    return []
  shards = experiment.num_shards // place.actors_per_device
  groups = experiment.num_grad_shards
  if scheme.colocated or scheme.graph.one_program:
    counts = [(n, n) for n in (1, _divisor(math.gcd(shards, groups), devices))]
    is_open = is_open if len(is_open) == 2 else set()
  else:
    counts = [(actors, learners) for actors in (_divisor(shards, devices), 1)
              for learners in (_divisor(groups, devices), 1)]
  others = []
  for actors, learners in counts:
    wanted = {'actor_devices': tuple(range(actors)), 'learner_devices': tuple(range(learners))}
    other = _with(place, {name: wanted[name] for name in is_open})
    if other != place and other not in others:
      others.append(other)
  return others


def _is_alone(experiment: Experiment) -> bool:
  """Returns whether a run has one device: one program spans several with JAX functions only."""
  scheme = experiment.scheme
  return scheme.alone and not (scheme.graph.one_program and experiment.spec.is_function)


def _threads(experiment: Experiment, machine: Machine, processes: int, place: PlacementOptions
             ) -> dict[str, Any]:
  """Returns the threads of pools and of XLA, and the updates of a call.

  Args:
    experiment: to place.
    machine: that it runs on.
    processes: of the run.
    place: its devices.
  """
  pools = max(1, experiment.num_shards // processes)
  # Numbers that do not divide are refused later.
  width = max(1, experiment.env.num_envs // experiment.num_shards)
  step_s = width * experiment.spec.step_us * 1e-6
  share = max(1, machine.cores // pools)
  # Threads of a short step are worth it only if they are near each other.
  most = share if step_s > 10 * _THREAD_S else min(share, machine.near)
  env_threads = min(most, width, max(1, round(step_s / _THREAD_S)))
  if experiment.spec.calls_python:
    # Nobody knows how long these steps take, and a second process costs nothing: with CartPole,
    # the fastest of them, it was 0.98 times as fast.
    env_threads = min(share, width)
  # XLA cuts an operation into a piece for each thread; small ones are slower in pieces. Where JAX
  # starts before the size of an observation is known, the update counts as large.
  is_small = (_numbers(experiment) < _NUMBERS_OF_A_DEVICE
              and not may_start_jax(experiment.env.task))
  threads = max(2, place.num_devices, 0 if is_small else xla_threads(machine))
  update_s = (experiment.batch_rows * experiment.spec.step_us * 1e-6 / env_threads
              + experiment.batch_rows * _passes(experiment) * _ROW_S
              + _numbers(experiment) * _NUMBER_S)
  calls = 2 ** round(math.log2(max(_CALL_S / update_s, 1)))
  return dict(env_threads=place.env_threads or env_threads, xla_threads=threads,
              updates_per_call=min(calls, _MOST_UPDATES_PER_CALL))


def _passes(experiment: Experiment) -> float:
  """Returns how often an update computes a gradient of each row that it was given."""
  if experiment.replay is None:
    return experiment.num_epochs
  return experiment.replay.gradient_steps * experiment.replay.batch_size / experiment.batch_rows


def _numbers(experiment: Experiment) -> float:
  """Returns the numbers of observations that the gradients of an update read."""
  return (experiment.batch_rows * _passes(experiment) * math.prod(experiment.spec.obs_shape))


def _divisor(number: int, most: int, unit: int = 1) -> int:
  """Returns the largest divisor of a number up to `most` that is a multiple of `unit`.

  It is `unit` if `most` is less, and 1 if there is no such divisor.
  """
  return next((n for n in range(min(number, max(most, unit)), 0, -1)
               if number % n == 0 and n % unit == 0), 1)


def as_json(place: PlacementOptions) -> dict[str, Any]:
  """Returns the fields that a rule may choose, as receipts have them."""
  return {name: getattr(place, name) for name in FIXED | {'env_threads': 0}}


def as_flags(place: PlacementOptions) -> str:
  """Returns the fields that the rule has chosen, as flags that give the same; '' if none."""
  values = {name: str(getattr(place, name)).replace(' ', '') for name in place.chosen}
  return ' '.join(f'--config.placement.{name}={value}' if '(' not in value
                  else f"--config.placement.{name}='{value}'" for name, value in values.items())
