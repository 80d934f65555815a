"""Types of the data that modules exchange, with their shapes.

T is the unroll length, B the number of environments. All arrays are time-major.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = Any  # all that an algorithm trains, and the running moments; a pytree
# Arrays [B, ...] that an algorithm passes on from row to row, such as the state of a recurrent
# core; None for algorithms without one.
Carry = Any
Metrics = dict[str, jax.Array]


class Episodes(NamedTuple):
  """Statistics of the episode that each row belongs to. The loss of a life ends no episode."""

  ended: jax.Array  # [T, B] bool: the episode ended with this row
  episode_return: jax.Array  # [T, B] f32: sum of the episode's unclipped rewards up to this row
  length: jax.Array  # [T, B] i32: valid rows of the episode up to this row
  # [1, B, 5] i32: the first value of each environment that cannot be learned from, as
  # `actor.faults.find` returns it; None if nobody has looked.
  fault: jax.Array | None = None


class Rollout(NamedTuple):
  """Rows of experience: the policy saw obs[t] and took action[t]; the rest came with obs[t + 1].

  A row is invalid if obs[t] is the last observation of a finished episode: EnvPool resets in that
  step and ignores the action. The observation itself is real; a truncation bootstraps from it.
  """

  obs: Any  # [T + 1, B, ...] in the environment's dtype; or frames.Frames of these
  action: jax.Array  # [T, B] i32; or [T, B, A] f32 as the policy drew it
  # [T, B, ...] each: what `Algorithm.act` added, such as the acting policy's log-probability and
  # value, {'log_prob', 'value'}
  extras: Any
  reward: jax.Array  # [T, B] f32, as the environment gives it
  terminated: jax.Array  # [T, B] bool: no state follows (or, by option, a life was lost)
  truncated: jax.Array  # [T, B] bool: cut by the time limit; obs[t + 1] is the true last frame
  valid: jax.Array  # [T, B] bool
  episodes: Episodes | None  # None once the learner has set them aside
  # [T, B] f32: discounted rewards up to this row, if rewards are normalised.
  discounted_return: jax.Array | None = None
  carry: Carry = None  # [1, B, ...] each: what `Algorithm.act` was given in row 0


class Experience(NamedTuple):
  """Rollout in the form in which it is added to a replay; it has the rows of Rollout.

  The priority of an item of L rows needs the row after its last. So `priority` and `starts` are of
  the items that this rollout completes, each of which began L rows before the row that completes
  it. Items begin in each row (S = T), or where rollouts begin (S = 1).
  """

  obs: jax.Array  # [T + 1, B, ...]: the newest frame of each observation
  is_reset_stack: jax.Array  # [T + 1, B] bool: all frames of the stack are this frame
  began: jax.Array  # [1, B] bool: the environments were just started: no row precedes row 0
  action: jax.Array  # [T, B, ...]
  reward: jax.Array  # [T, B] f32
  terminated: jax.Array  # [T, B] bool
  truncated: jax.Array  # [T, B] bool
  valid: jax.Array  # [T, B] bool
  priority: jax.Array  # [S, B] f32, as `Algorithm.priority` returns it
  # [S, B] bool: this item exists; unless it is a sequence, its first row was valid
  starts: jax.Array
  episodes: Episodes | None  # None once the learner has set them aside
  carry: Carry = None  # [1, B, ...] each, as in `Rollout`; for sequences only


class Transition(NamedTuple):
  """Transitions over n steps, or fewer if the episode ends before.

  All arrays have the leading axes of the draw.
  """

  obs: jax.Array  # [...]: observation before the first step
  action: jax.Array  # [...]: first action
  reward: jax.Array  # [...] f32: discounted sum of the rewards
  discount: jax.Array  # [...] f32: gamma^steps; 0 if the episode terminated
  next_obs: jax.Array  # [...]: observation after the last step; of a truncation, the true last one


class TrainState(NamedTuple):
  """State of a run; replicated on the learner mesh, donated to each update."""

  params: Params
  opt_state: Any
  update: jax.Array  # i32: updates done
  steps: jax.Array  # valid agent steps learned from, see `numerics.counters`
  key: jax.Array  # PRNG key of the run; each update folds in its number, the key never changes
  # None if the algorithm's `init_target` returns None; with a replay, Target(None, count) then
  target: Target | None = None
  # `replay.buffer.State`, of which each device stores its own blocks of environments; or the
  # rollouts that an auxiliary phase learns from, sharded by group. None without either.
  replay: Any | None = None

  def with_target(self, params: Params) -> TrainState:
    """Returns the state with other target parameters; the count of gradient steps stays."""
    assert self.target is not None, 'the algorithm has no init_target'
    return self._replace(target=self.target._replace(params=params))


class Target(NamedTuple):
  """Parameters that losses read and no gradient changes, and the count of gradient steps."""

  params: Params  # as `Algorithm.init_target` returns it
  gradient_steps: jax.Array  # i32: gradient steps done since the start of the run


def discounts(rollout: Rollout, discount: float) -> jax.Array:
  """Returns the discounts of a rollout's rows.

  The discount is 0 after a termination. After a truncation it is not, since returns bootstrap from
  the true last observation.

  Args:
    rollout: [T, B].
    discount: gamma.

  Returns:
    [T, B] f32.
  """
  return discount * (1.0 - rollout.terminated.astype(jnp.float32))
