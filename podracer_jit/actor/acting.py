"""How actors act: three ways with one interface, each made ready for segments of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.actor import asynchronous, priorities, rollouts
from podracer_jit.envs.protocol import Shard


class Acting(Protocol):
  """How the actors of a run make experience."""

  unroll_length: int

  def rollout(self, shards: Sequence[Shard]) -> Callable:
    """Returns rollout(params, actor_state) -> (actor_state, experience), to be jitted."""

  def initial_state(self, shards: Sequence[Shard], keys: Sequence[jax.Array], first_env: int
                    ) -> rollouts.ActorState:
    """Returns the state of an actor of fresh shards.

    Args:
      shards: with the environments, all of one size.
      keys: of each shard.
      first_env: the number of its first environment among all of the run.
    """


class InStep(NamedTuple):
  """All environments of a shard take each step together; the way without a replay."""

  network: nn.Module
  unroll_length: int
  stack: int  # frames of an observation, see `protocol.EnvSpec`
  discount: float | None  # of the discounted returns that normalised rewards need

  def rollout(self, shards: Sequence[Shard]) -> Callable:
    """See `Acting`: the experience is one Rollout a shard."""
    return rollouts.make_rollout(shards, self.network.apply, self.network.policy,
                                 self.unroll_length, self.stack, self.discount)

  def initial_state(self, shards: Sequence[Shard], keys: Sequence[jax.Array], first_env: int
                    ) -> rollouts.ActorState:
    """See `Acting`."""
    del first_env
    return rollouts.initial_state(shards, keys, self.network.initial_core)


class FirstReady(NamedTuple):
  """Each step is of the first environments that are ready; what is made depends on timing."""

  network: nn.Module
  unroll_length: int
  stack: int
  obs: jax.ShapeDtypeStruct  # one observation

  def rollout(self, shards: Sequence[Shard]) -> Callable:
    """See `Acting`: the experience is one Rollout of the only shard."""
    (shard,) = shards
    return asynchronous.make_rollout(shard, self.network.apply, self.network.policy,
                                     self.unroll_length, self.stack)

  def initial_state(self, shards: Sequence[Shard], keys: Sequence[jax.Array], first_env: int
                    ) -> rollouts.ActorState:
    """See `Acting`."""
    del first_env
    (shard,), (key,) = shards, keys
    return asynchronous.initial_state(shard, key, self.obs, self.network.policy,
                                      self.unroll_length)


class ForReplay(NamedTuple):
  """All environments in step, each exploring by an amount of its own, with initial priorities."""

  network: nn.Module
  unroll_length: int
  stack: int
  n_step: int
  discount: float
  exploration: np.ndarray  # [num_envs] f32, of all environments of the run

  def rollout(self, shards: Sequence[Shard]) -> Callable:
    """See `Acting`: what is made is one Experience a shard."""
    def action_value(params: Any, *args: jax.Array) -> jax.Array:
      return self.network.apply(params, *args, method='action_value')

    plain = rollouts.make_rollout(
        shards, self.network.apply, self.network.policy, self.unroll_length, self.stack,
        action_value=action_value)
    return priorities.with_priorities(plain, self.n_step, self.discount)

  def initial_state(self, shards: Sequence[Shard], keys: Sequence[jax.Array], first_env: int
                    ) -> rollouts.ActorState:
    """See `Acting`."""
    width = shards[0].num_envs
    ends = range(first_env, first_env + width * len(shards), width)
    explore = [jnp.array(self.exploration[first:first + width]) for first in ends]
    state = rollouts.initial_state(shards, keys, self.network.initial_core, explore)
    return priorities.initial_state(state, self.n_step)
