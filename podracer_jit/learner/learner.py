"""What learners from rollouts and learners from a replay have in common."""

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
  """The three independent streams of a run."""

  init: jax.Array  # first parameters
  learn: jax.Array
  act: jax.Array


def keys_of(seed: int) -> Keys:
  """Returns the streams of a seed; traceable."""
  return Keys(*jax.random.split(jax.random.key(seed), 3))


class Parts(NamedTuple):
  """What every learner is made of."""

  network: nn.Module
  obs_shape: Sequence[int]
  obs_dtype: Any
  optimizer: optax.GradientTransformation
  learning_rate: Callable[[jax.Array], jax.Array]  # valid steps learned from -> rate
  mesh: Mesh


class Learner(abc.ABC):
  """Turns a train state and a round of experience into the next train state.

  Subclasses say how. `learn` is for one device of the mesh, to be put into a larger program;
  `program` is the same for the whole mesh.
  """

  gradient_steps: int  # of an update
  learn: Callable[[TrainState, Any], tuple[TrainState, Metrics]]

  def __init__(self, parts: Parts):
    """Makes a learner; compiles nothing."""
    self.parts = parts

  @functools.cached_property
  def program(self) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """`learn` on the whole mesh, jitted; it donates the state."""
    return sharding.fused_learner(self.learn, self.parts.mesh)

  def initial_state(self, seed: int) -> TrainState:
    """Returns the train state of update 0 on the mesh, without the replay that `allocate` adds."""
    return placement.replicate(jax.jit(self._first_state)(seed), self.parts.mesh)

  def state_shapes(self) -> TrainState:
    """Returns the shapes of `initial_state` on one device of the mesh; allocates nothing."""
    return jax.eval_shape(self._first_state, 0)

  def _first_state(self, seed: jax.Array) -> TrainState:
    keys = keys_of(seed)
    params = networks.init_params(self.parts.network, keys.init, self.parts.obs_shape,
                                  self.parts.obs_dtype)
    return TrainState(params, self.parts.optimizer.init(params), jnp.int32(0), jnp.int32(0),
                      keys.learn, self._initial_target(params))

  def _initial_target(self, params: Params) -> Target | tuple[()]:
    return ()

  def allocate(self, state: TrainState) -> TrainState:
    """Returns the state with all that learning needs: a replay, if it has none yet."""
    return state

  def replay_shapes(self) -> Any:
    """Returns the shapes and shardings of the replay, to restore it into; () without one."""
    return ()

  @abc.abstractmethod
  def mean_cgd(self, behind: float) -> float:
    """Returns the mean CGD of an update (NAPPO's collection-to-gradient delay).

    Args:
      behind: gradient steps between the parameters of the rollouts and those of the update's
        first gradient.
    """
