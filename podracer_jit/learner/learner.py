"""The interface of learners, and the code that learners from rollouts and from a replay share."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from podracer_jit.agents import networks
from podracer_jit.learner import sharding
from podracer_jit.runtime import placement
from podracer_jit.types import Metrics, Params, Target, TrainState


class Keys(NamedTuple):
  """PRNG keys of a run's three independent streams."""

  init: jax.Array  # initial parameters
  learn: jax.Array  # minibatch order, draws from a replay
  act: jax.Array  # actions and exploration


def keys_of(seed: int) -> Keys:
  """Returns the keys of a seed, which may be traced."""
  return Keys(*jax.random.split(jax.random.key(seed), 3))


class Parts(NamedTuple):
  """Components that every learner needs."""

  network: nn.Module
  obs_shape: Sequence[int]  # of one observation
  obs_dtype: Any
  optimizer: optax.GradientTransformation
  learning_rate: Callable[[jax.Array], jax.Array]  # valid steps learned from so far -> rate
  mesh: Mesh


class Learner(abc.ABC):
  """Map from a train state and a round of experience to the next train state.

  `learn` is the function of one device of the mesh, for use inside a larger program. `program` is
  the compiled function of the whole mesh.
  """

  gradient_steps: int  # in one update
  # (state, experience of this device's environments) -> (state, metrics)
  learn: Callable[[TrainState, Any], tuple[TrainState, Metrics]]

  def __init__(self, parts: Parts):
    """Builds a learner; compiles nothing."""
    self.parts = parts

  @functools.cached_property
  def program(self) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Jitted `learn` on the whole mesh; it donates the state."""
    return sharding.fused_learner(self.learn, self.parts.mesh)

  def initial_state(self, seed: int) -> TrainState:
    """Returns the train state before the first update, on the mesh and without a replay.

    `allocate` adds the replay.
    """
    # Jitted, so that the seed is data: all seeds share one program in the cache.
    return placement.replicate(self._compiled_first_state(seed), self.parts.mesh)

  @functools.cached_property
  def _compiled_first_state(self) -> Callable[[int], TrainState]:
    return jax.jit(self._first_state)

  def state_shapes(self) -> TrainState:
    """Returns the shapes of `initial_state`; allocates nothing."""
    return jax.eval_shape(self._first_state, 0)

  def _first_state(self, seed: jax.Array) -> TrainState:
    keys = keys_of(seed)
    params = networks.init_params(self.parts.network, keys.init, self.parts.obs_shape,
                                  self.parts.obs_dtype)
    return TrainState(params, self.parts.optimizer.init(params), jnp.int32(0), jnp.int32(0),
                      keys.learn, self._initial_target(params))

  def _initial_target(self, params: Params) -> Target | None:
    return None

  def allocate(self, state: TrainState) -> TrainState:
    """Returns the state with an empty replay, if the learner needs one and it has none."""
    return state

  def replay_shapes(self) -> Any | None:
    """Returns the shapes and shardings of the replay, for restoring it; None without a replay."""
    return None

  @abc.abstractmethod
  def mean_cgd(self, behind: float) -> float:
    """Returns the mean collection-to-gradient delay (CGD) of an update, in gradient steps.

    CGD is defined in NAPPO (2007.02622, section 3).

    Args:
      behind: gradient steps between the parameters that made the rollouts and the parameters of the
        update's first gradient.
    """
