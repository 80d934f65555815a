"""Finished workdirs, and algorithms bound to a task, that many tests begin with."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from podracer_jit.agents.networks import MLP, TorsoOptions
from podracer_jit.agents.optimizers import Adam
from podracer_jit.agents.policies import FAMILIES
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.algorithm import Parts

# A task with vectors of four numbers and two actions.
SPEC = EnvSpec('CartPole-v1', (4,), np.dtype(np.float32), 2, (), (), 1, 500)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
  """Returns a folder of this run of pytest that `make(folder)` has filled, once for all workers.

  Tests only read it, or copy it first.

  Args:
    factory: the fixture `tmp_path_factory`.
    name: names the folder.
    make: fills the empty folder.
  """
  base = factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    base = base.parent  # that of all workers
  done = base / f'{name}.done'
  with (base / f'{name}.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = base / name
    if not done.exists():
      folder.mkdir()  # fails again in other workers if `make` has failed in one
      make(folder)
      done.touch()
  return folder


class Function:
  """A network in place of flax's: a function (params, obs [N, ...]) -> outputs, [N, ...] each."""

  def __init__(self, function, params):
    self._function = function
    self._params = params

  def init(self, key, obs, *carry_and_valid):
    del key, obs, carry_and_valid
    return self._params

  def apply(self, params, obs, *carry_and_valid):
    """Returns outputs [T, N, ...] of obs [T, N, ...]; then the carry as it is, if there is one."""
    outputs = self._function(params, obs.reshape(-1, *obs.shape[2:]))
    return *(x.reshape(*obs.shape[:2], *x.shape[1:]) for x in outputs), *carry_and_valid[:1]


def bound(algorithm, network=None, **parts):
  """Returns an algorithm that is bound to a task.

  Args:
    algorithm: its options.
    network: takes the place of the network that the algorithm makes; None: that one.
    **parts: of `Parts`; the others are small. The policy is the first that fits, as with `auto`.
  """
  spec = parts.setdefault('spec', SPEC)
  if 'policy' not in parts:
    choices = spec.action_choices or spec.num_actions
    kind = algorithm.policy_reads, bool(choices), bool(spec.action_choices)
    family = next(x for x in FAMILIES.values() if (x.reads, x.discrete, x.several) == kind)
    bounds = np.array([spec.action_low, spec.action_high], np.float32)
    parts['policy'] = family.make(choices) if choices else family.make(*bounds)
  small = dict(torso=MLP(hidden=(8,)), torso_options=TorsoOptions(), moments=(), optimizer=Adam(),
               total_steps=1000, num_envs=8, unroll_length=8)
  algorithm = algorithm.bind(Parts(**small | parts))
  if network is not None:
    vars(algorithm)['network'] = network  # where the dataclass caches it
  return algorithm
