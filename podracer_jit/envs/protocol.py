"""Interface of environments: a spec, and vector environments that a compiled program steps.

An environment family creates both: `envpool_envs` for tasks of EnvPool, `jax_envs` for environments
that are JAX functions, `gymnasium_envs` for environments that Python steps. A user's family is an
object with the functions of `EnvFamily`, given as `env.task = 'module:attribute'`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.envs.spaces import ObsPart, Spaces


def take_apart(obs: jax.Array, parts: Sequence[ObsPart]) -> dict[str, jax.Array]:
  """Returns the parts of flat observations by name.

  Args:
    obs: [..., D], flat observations.
    parts: `EnvSpec.parts`, which cover all D elements.

  Returns:
    An array [..., *part.shape] of the part's dtype for each part.
  """
  chex.assert_axis_dimension(obs, -1, sum(part.size for part in parts))
  return {
      part.name: obs[..., part.start:part.start + part.size]
      .reshape(*obs.shape[:-1], *part.shape).astype(part.dtype)
      for part in parts}


class EnvSpec(NamedTuple):
  """Specification of a task, known without starting an environment."""

  task: str
  obs_shape: tuple[int, ...]  # of one observation
  obs_dtype: np.dtype  # as the learner sees it: float64 is converted to float32
  num_actions: int  # 0 if an action is a vector
  action_low: tuple[float, ...]  # lower bound of each element of an action; () if not continuous
  action_high: tuple[float, ...]  # upper bound of each element of an action; () if not continuous
  frame_skip: int  # frames of one step
  max_episode_steps: int  # 0 if unknown or unlimited
  stack: int = 1  # frames in an observation if `frames.Frames` can hold them, else 1
  is_function: bool = False  # the environments are JAX functions, see `jax_envs`
  calls_python: bool = False  # Python steps the environments, see `gymnasium_envs`
  repeats: bool = True  # the same seeds and actions always give the same episodes
  channels_last: bool = False  # observations are images (H, W, C), not (C, H, W)
  parts: tuple[ObsPart, ...] = ()  # of a flat observation; () if it is a single array
  # An action is a vector of integers; element i is from 0 to action_choices[i] - 1. () for others.
  action_choices: tuple[int, ...] = ()
  step_us: float = 1.0  # microseconds that a step takes, roughly; placements follow from it
  # Place of the mask of legal actions in flat observations, an element for each choice; None: all
  # are legal. `agents.action_masks.find` sets it, not a family.
  action_mask: ObsPart | None = None


class TimeStep(NamedTuple):
  """Results of one step of B environments: all of them, or the first B that are ready."""

  obs: jax.Array  # [B, ...]
  reward: jax.Array  # [B] f32
  terminated: jax.Array  # [B] bool; with episodic_life also true when a life was lost
  truncated: jax.Array  # [B] bool
  raw_reward: jax.Array  # [B] f32: before any clipping
  game_over: jax.Array  # [B] bool: terminated, but not by the loss of a life
  env_id: jax.Array  # [B] i32: indices of the environments within the vector environment


class VectorEnv(Protocol):
  """Vector of environments that are stepped together, by traceable calls.

  `send` and `recv` take and return a token and a state. All vector environments of a program pass
  on one token, which orders their calls: a simulator outside of the program needs this. The state
  belongs to one vector environment. JAX functions keep everything in it; a simulator outside of the
  program needs none.

  After the step that ends an episode, the next step is a reset: it ignores the action, and its
  reward is 0.
  """

  num_envs: int
  batch_size: int  # environments in one step: num_envs, or fewer if asynchronous
  first_obs: Any  # [num_envs, ...]; absent if asynchronous
  first_state: Any | None  # arrays [num_envs, ...]; None if the simulator keeps the state
  # True if they are JAX functions, so a program that steps them contains no pointers to a simulator
  # and is cached for later processes and segments, and a step is received in its own turn; absent
  # otherwise.
  is_function: bool
  # Places of one-hots in flat observations, which a rollout checks; absent if there are none, or if
  # the numbers were checked before.
  one_hots: Sequence[slice]
  # The number by which a program finds the simulator, if it has no other reference to it; absent
  # otherwise, None once the vector environment is closed. `RolloutProgram` loads a compiled program
  # with the addresses of other simulators, so it is cached, too.
  address: int | None

  @property
  def handle(self) -> np.ndarray:
    """Token for the first call."""

  def send(self, token: jax.Array, state: Any, action: jax.Array,
           env_id: jax.Array | None = None) -> tuple[jax.Array, Any]:
    """Starts a step and does not wait for its results.

    Args:
      token: the token of the last call, whichever vector environment it was for.
      state: the state of this vector environment.
      action: [batch_size, ...].
      env_id: [batch_size] i32, the environments that take the actions; None unless asynchronous.

    Returns:
      The next token, and the next state.
    """

  def recv(self, token: jax.Array, state: Any) -> tuple[jax.Array, Any, TimeStep]:
    """Waits for batch_size environments. Returns the next token and state, and their results."""

  def render(self, state: Any) -> np.ndarray:
    """Returns an image [H, W, 3] u8 of the first environment, whose `state` is passed on.

    Raises:
      RuntimeError: the task cannot be drawn.
    """

  @property
  def frame_rate(self) -> float:
    """Steps a second at the task's own speed, for videos; 10 if it has no clock."""

  def close(self) -> None:
    """Ends the environments. No program that contains them may run afterwards."""


class VectorEnvOfShapes:
  """Replaces a vector environment while shapes are computed; it starts no environments."""

  def __init__(self, spec: EnvSpec, num_envs: int, batch_size: int):
    self._spec = spec
    self.num_envs = num_envs
    self.batch_size = batch_size or num_envs
    self.handle = np.zeros(8, np.uint8)
    self.state_shapes: Any | None = None

  @property
  def first_state(self) -> Any:
    """See `VectorEnv`; use it inside of `jax.eval_shape` only."""
    return jax.tree.map(_empty, self.state_shapes)

  @property
  def first_obs(self) -> jax.Array:
    """See `VectorEnv`; use it inside of `jax.eval_shape` only."""
    return self._zeros(self.num_envs, self._spec.obs_dtype, *self._spec.obs_shape)

  def send(self, token: jax.Array, state: Any, action: jax.Array,
           env_id: jax.Array | None = None) -> tuple[jax.Array, Any]:
    """Does nothing, and returns the token and the state; see `VectorEnv.send`.

    Args:
      token: [] or of any shape; passed on.
      state: of the environments; passed on.
      action: not read.
      env_id: not read.
    """
    del action, env_id
    return token, state

  def recv(self, token: jax.Array, state: Any) -> tuple[jax.Array, Any, TimeStep]:
    """See `VectorEnv`."""
    size = self.batch_size
    flag = self._zeros(size, bool)
    reward = self._zeros(size, jnp.float32)
    step = TimeStep(obs=self._zeros(size, self._spec.obs_dtype, *self._spec.obs_shape),
                    reward=reward, terminated=flag, truncated=flag, raw_reward=reward,
                    game_over=flag, env_id=self._zeros(size, jnp.int32))
    return token, state, step

  def _zeros(self, size: int, dtype: Any, *shape: int) -> jax.Array:
    return jnp.zeros((size, *shape), dtype)


def _empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array, or PRNG keys, of a shape and dtype."""
  if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
    return jax.random.split(jax.random.key(0), shape.shape)
  return jnp.zeros(shape.shape, shape.dtype)


class EnvFamily(Protocol):
  """Interface of environment families."""

  render_options: Mapping[str, Any]  # options with which `render` works; {} if absent

  def make_spec(self, task: str, options: Mapping[str, Any]) -> EnvSpec:
    """Returns the spec of a task without starting an environment.

    Args:
      task: `env.task` of the config.
      options: the other fields of the config's `env`, without num_envs.

    Raises:
      ValueError: one line that names the field, its value and a valid value.
    """

  def spaces_of(self, task: str, options: Mapping[str, Any]) -> Spaces:
    """Returns the spaces of a task, for agents that act outside of a run.

    A family may lack it; observations and actions of such agents are flat arrays.

    Args:
      task: `env.task` of the config.
      options: the other fields of the config's `env`, without num_envs.
    """

  def on_cores(self, first_core: int) -> dict[str, Any]:
    """Returns options with which `make_vector_env` keeps each of its threads on a core.

    A family may lack it; then `placement.pin_envs` is refused.

    Args:
      first_core: core of the first thread; the others are on those that follow.
    """

  def make_vector_env(self, task: str, options: Mapping[str, Any], seeds: Sequence[int],
                      num_threads: int, batch_size: int) -> VectorEnv:
    """Starts a vector environment.

    Args:
      task: `env.task` of the config.
      options: the other fields of the config's `env`, without num_envs.
      seeds: one for each environment, all different.
      num_threads: threads that step the environments; 0 lets the family choose.
      batch_size: 0 for lockstep; otherwise a step waits for this many environments only.

    Returns:
      The vector environment, already reset.
    """
