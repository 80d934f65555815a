"""The protocol of algorithms: five pure functions of arrays, and hooks with defaults.

An algorithm is one frozen dataclass in one file. Its fields are its options (`options.option`), its
class attributes say what it needs, its methods are pure. `bind` tells it what the config and the
task have chosen. The rollout, the replay, the exact sum over devices and the schemes know nothing
else of it, so a user's algorithm, given as `module:Class`, equals a shipped one.

T is the unroll length, B and N are numbers of environments or items, L is the length of an item.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from podracer_jit import schedules
from podracer_jit.agents import action_masks, networks, policies, running_moments
from podracer_jit.agents.networks import TORSO, TorsoOptions
from podracer_jit.agents.optimizers import Optimizer
from podracer_jit.agents.policies import Policy
from podracer_jit.envs import frames
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.items import Items, environments
from podracer_jit.numerics import counters
from podracer_jit.numerics.precision import HIGHEST
from podracer_jit.options import internal, option
from podracer_jit.types import Carry, Metrics, Params, Rollout, Target, TrainState

MAX_N_STEP = 256  # a program has operations for each step


class Parts(NamedTuple):
  """Choices of the config and the task for an algorithm."""

  spec: EnvSpec
  policy: Policy
  torso: nn.Module  # the config's `network`
  torso_options: TorsoOptions
  moments: tuple[str, ...]  # normalised quantities, of 'obs', 'returns' and 'values'
  optimizer: Optimizer
  total_steps: int
  num_envs: int  # of the run
  unroll_length: int
  min_size: int = 0  # steps whose items a replay has before the first gradient step
  precision: str = HIGHEST  # of products and convolutions, see `numerics.precision`


class Acted(NamedTuple):
  """Results of acting in B environments."""

  action: jax.Array  # [B, *action_shape], as the policy drew it
  extras: Any = None  # arrays [B, ...], stored as Rollout.extras [T, B, ...]
  carry: Carry = None  # arrays [B, ...], for the next row
  # [B, K]: what the action was drawn from or chosen by, for exports; never stored
  distribution: jax.Array | None = None


class ForActors(NamedTuple):
  """Part of a train state that actors get."""

  params: Any  # the result of `Algorithm.acting`
  steps: jax.Array | None = None  # of the state, if an option changes with them; else None


class Batch(NamedTuple):
  """Microbatch of one group, a part of a minibatch of all groups."""

  items: Any  # what `Items.make` returns: Rollout [L, N, ...] or Transition [N, ...]
  targets: Any  # arrays [L, N, ...] of `targets`; None for items of a replay
  weight: jax.Array | None  # [N] f32: importance weights of a replay; None for rollouts
  # It takes the place of tuple.count.
  count: jax.Array  # type: ignore[assignment]  # [] f32: valid rows (of a replay: items) of the whole minibatch, at least 1
  statistics: Any  # of the whole minibatch


class Predictions(NamedTuple):
  """Sums over valid rows that tell how well a critic predicts its targets, [] f32 each."""

  error: jax.Array  # target - value
  squared_error: jax.Array
  target: jax.Array
  squared_target: jax.Array

  @classmethod
  def of(cls, value: jax.Array, target: jax.Array, valid: jax.Array) -> Predictions:
    """Returns the sums for values and targets that are shaped like `valid`, a bool array."""
    chex.assert_equal_shape([value, target, valid])
    error = target - value
    return cls(*(jnp.sum(jnp.where(valid, x, 0.0)) for x in (
        error, jnp.square(error), target, jnp.square(target))))

  def explained_variance(self, rows: jax.Array) -> jax.Array:
    """Returns 1 - Var(target - value) / Var(target), [] f32; 0 if the targets are equal.

    Args:
      rows: number of valid rows, at least 1.
    """
    def variance(total, squared):
      return jnp.maximum(squared / rows - jnp.square(total / rows), 0.0)

    of_targets = variance(self.target, self.squared_target)
    # A difference of float32 sums that is smaller than this is rounding.
    is_known = of_targets > 1e-6 * self.squared_target / rows
    share = variance(self.error, self.squared_error) / jnp.where(is_known, of_targets, 1.0)
    return jnp.where(is_known, 1.0 - share, 0.0)


class Aux(NamedTuple):
  """Results of a loss beside its value."""

  terms: Metrics  # sums over the valid rows (or items) of the microbatch; logged as means
  valid: jax.Array  # [] f32: number of these rows
  priority: jax.Array | None = None  # [N] f32: new priorities of the items of a replay
  predictions: Predictions | None = None  # of a critic; logged as 'explained_variance'

  @classmethod
  def of(cls, terms: Mapping[str, jax.Array], valid: jax.Array) -> Aux:
    """Returns the sums of terms over the valid rows; all are shaped like `valid`, a bool array."""
    chex.assert_equal_shape([valid, *terms.values()])
    mask = valid.astype(jnp.float32)
    return cls({name: jnp.sum(mask * term) for name, term in terms.items()}, jnp.sum(mask))

  def metrics(self) -> Metrics:
    """Returns the metrics of an update, from sums over all its gradient steps."""
    rows = jnp.maximum(self.valid, 1.0)
    means = {name: total / rows for name, total in self.terms.items()}
    if self.predictions is None:
      return means
    return means | {'explained_variance': self.predictions.explained_variance(rows)}


class Auxiliary(NamedTuple):
  """Phase of training on the rollouts of several updates, at the end of the last of them."""

  algorithm: Algorithm  # bound; its items, statistics, gradient and update are those of the phase
  every: int  # updates from one phase to the next, whose rollouts the core keeps
  num_epochs: int
  num_minibatches: int  # of an epoch


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC):
  """Base class of algorithms; its defaults are those of an actor-critic that learns from rollouts.

  The methods that compute are compiled as islands (`numerics.islands`): each by itself, with shapes
  that do not depend on the placement. So they need no care about rounding.
  """

  learns_from_replay: ClassVar[bool] = False
  policy_reads: ClassVar[str] = policies.DISTRIBUTION  # the kind of `Acted.distribution`
  network_role: ClassVar[str] = TORSO  # of the config's network: TORSO or POLICY_AND_CRITIC
  # Options of TorsoOptions that its network has: 'core', 'separate_critic'.
  takes: ClassVar[frozenset[str]] = frozenset({'core', 'separate_critic'})
  # Quantities that may be normalised; of those, a replay can have 'obs' only.
  normalises: ClassVar[frozenset[str]] = frozenset({'obs', 'returns'})
  shuffles: ClassVar[bool] = False  # each epoch shuffles the items of its minibatches
  measures_kl: ClassVar[bool] = False  # its terms include 'approx_kl'
  # False: `targets` gets the observations after the last row only, so fewer stacks are rebuilt.
  targets_read_all_obs: ClassVar[bool] = False

  discount: float = option(0.99, 'discount of future rewards', at_least=0, at_most=1)
  parts: Parts = internal(None)
  steps_done: Any = internal(None)  # see `at`

  def bind(self, parts: Parts) -> Self:
    """Returns the algorithm for a task, a policy, a network and an optimizer."""
    return dataclasses.replace(self, parts=parts)

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    yield from ()

  def at(self, steps: jax.Array | None) -> Self:
    """Returns the algorithm with the values that its schedules have after so many steps.

    The core calls it in each island. So an option that is a number in all methods that compute may
    be a `schedules.Schedule` outside of them.

    Args:
      steps: a count of steps, see `numerics.counters`; None leaves the algorithm as it is.
    """
    if steps is None:
      return self
    algorithm = dataclasses.replace(self, steps_done=steps)
    p = self.parts
    if schedules.scheduled(self) | schedules.scheduled(p.optimizer):
      done = counters.as_float(steps)
      optimizer = schedules.at(p.optimizer, done, p.total_steps)
      algorithm = schedules.at(algorithm, done, p.total_steps).bind(
          p._replace(optimizer=optimizer))
    # The network does not depend on them, so it need not be made again.
    vars(algorithm)['network'] = self.network
    return algorithm

  @property
  def share(self) -> jax.Array:
    """The share of total_steps that is done, [] f32.

    Raises:
      ValueError: in methods of actors, which know it only if an option is a schedule.
    """
    if self.steps_done is None:
      raise ValueError('share: actors do not know how much of a run is done; let an option be a '
                       'schedule instead, such as linear:1:0.05')
    return counters.as_float(self.steps_done) / self.parts.total_steps

  # 1. init: what the algorithm owns; computed on the learner.

  @functools.cached_property
  def network(self) -> nn.Module | action_masks.Masked:
    """The network of `make_network`; on a task with an action mask, `action_masks.Masked`."""
    return action_masks.masked(self.make_network(), self.parts.spec)

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The transformation of `make_optimizer`."""
    return optax.with_extra_args_support(self.make_optimizer())

  def make_network(self) -> nn.Module:
    """Returns the network; by default an actor-critic around the config's torso.

    If the task has an action mask, the network does not see it, and must return first what the
    policy reads, [T, N, K] (`agents.action_masks`).
    """
    p = self.parts
    network = networks.actor_critic(p.torso, p.policy, p.torso_options, p.moments)
    heads = self.heads()
    return network.clone(heads=heads) if heads else network

  def heads(self) -> Mapping[str, nn.Module]:
    """Returns auxiliary heads of the actor-critic by name; by default none.

    A head is a flax module (features [N, F], action [N, ...]) -> [N, ...]. Its parameters are
    trained with the network's. `unroll` with actions gives its outputs; acting does not compute it.
    """
    return {}

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the optimizer, without the learning rate; by default the config's."""
    return self.parts.optimizer.transformation()

  def init(self, key: jax.Array) -> Params:
    """Returns the parameters: all that is trained, and the running moments."""
    spec = self.parts.spec
    obs = jnp.zeros((1, 1, *spec.obs_shape), spec.obs_dtype)
    return self.network.init(key, obs, self.initial_carry(1), jnp.ones((1, 1), bool))

  def init_target(self, params: Params) -> Any:
    """Returns what losses read and no gradient changes, such as a target network; by default None.

    It becomes `state.target.params`.
    """
    del params

  def first_state(self, key: jax.Array, learn_key: jax.Array) -> TrainState:
    """Returns the state before the first update, without a replay.

    Args:
      key: for `init`.
      learn_key: of all updates.
    """
    params = self.init(key)
    target = self.init_target(params)
    has_target = target is not None or self.learns_from_replay  # a replay's clock is the count
    steps = counters.zero(self.parts.total_steps + self.parts.num_envs * self.parts.unroll_length)
    return TrainState(params, self.at(steps).optimizer.init(params), jnp.int32(0), steps, learn_key,
                      Target(target, jnp.int32(0)) if has_target else None)

  @functools.cached_property
  def state_shapes(self) -> TrainState:
    """The shapes of `first_state`."""
    key = jax.eval_shape(jax.random.key, 0)
    return jax.eval_shape(self.first_state, key, key)

  # 2. act: on the actors.

  def for_actors(self, state: TrainState) -> ForActors:
    """Returns what actors get of a state."""
    return ForActors(self.acting(state), state.steps if schedules.scheduled(self) else None)

  def acting(self, state: TrainState) -> Any:
    """Returns what actors get of the state. It selects arrays only; `act` computes."""
    return state.params

  @property
  def recurrent(self) -> bool:
    """Whether the config's network has a recurrent core, which reads rows in order."""
    return self.parts.torso_options.recurrent

  def initial_carry(self, num_envs: int) -> Carry:
    """Returns the carry at the beginning of episodes, arrays [num_envs, ...]; None: no carry."""
    return self.network.initial_carry(num_envs) if self.recurrent else None

  def exploration(self, num_envs: int) -> np.ndarray | None:
    """Returns each environment's constant of exploration in `act`, [num_envs] f32, or None.

    If an option is a schedule, options may be traced arrays: use operators, not functions of NumPy.
    """
    del num_envs
    return None

  def act(self, params: Any, obs: jax.Array, carry: Carry, valid: jax.Array,
          key: jax.Array | None, exploration: jax.Array | None) -> Acted:
    """Acts in B environments.

    Args:
      params: the result of `acting`.
      obs: [B, ...].
      carry: arrays [B, ...].
      valid: [B] bool. False: obs is the last of an episode, the action is ignored, and the carry
        after it must be the initial one.
      key: PRNG key of the row; None: take the most likely action.
      exploration: [B] f32, these environments' constants; None in evaluations without
        `eval.epsilon`.
    """
    del exploration
    outputs: Any = self.network.apply(params, obs[None], carry, valid[None])
    dist_params, value, carry = outputs
    chex.assert_rank([dist_params, value], [3, 2])  # [1, B, K] and [1, B]
    policy = self.parts.policy
    action = policy.mode(dist_params[0]) if key is None else policy.sample(key, dist_params[0])
    assert policy.log_prob is not None, 'only policies that read a distribution act here'
    extras = {'log_prob': policy.log_prob(dist_params[0], action), 'value': value[0]}
    return Acted(action, extras, carry, dist_params[0])

  @functools.cached_property
  def acted_shapes(self) -> Acted:
    """The shapes of the results of `act` in one environment, [1, ...] each."""
    spec = self.parts.spec

    def act(state, key):
      obs = jnp.zeros((1, *spec.obs_shape), spec.obs_dtype)
      algorithm = self.at(state.steps)
      return algorithm.act(self.acting(state), obs, self.initial_carry(1), jnp.ones(1, bool), key,
                           algorithm.exploration(1))

    return jax.eval_shape(act, self.state_shapes, jax.eval_shape(jax.random.key, 0))

  # 3. items: `priority` on the actors, all else on the learner.

  def items(self) -> Items:
    """Returns the elements of minibatches, or of a replay; by default whole rollouts.

    The rows of a replay have no extras. With `items.transitions` they have no carry and no mask of
    valid rows either, and an item begins in each valid row; with `items.sequences` they have both,
    and an item begins where a rollout begins.
    """
    return environments(self.parts.unroll_length)

  def note_about_minibatches(self, rows: int) -> str:
    """Returns a phrase if it treats minibatches of so few rows in another way, else ''.

    Args:
      rows: of a minibatch of all groups, invalid ones included.
    """
    del rows
    return ''

  def priority(self, rows: Rollout) -> jax.Array:
    """Returns the first priority [N] f32 of items of a replay; by default equal ones.

    Args:
      rows: [L + 1, N, ...], the items' rows and the row after them, without obs and actions.
    """
    return jnp.ones(rows.reward.shape[1])

  def targets(self, state: TrainState, rollout: Rollout) -> Any:
    """Returns arrays [T, N, ...] for a group's rows, once an update; by default None.

    Args:
      state: at the beginning of the update.
      rollout: [T, N, ...]; see `targets_read_all_obs`.
    """
    del state, rollout

  def statistics(self, state: TrainState, valid: jax.Array, targets: Any) -> Any:
    """Returns statistics of a whole minibatch, from its rows in all groups; by default None.

    Args:
      state: at the gradient step.
      valid: [groups, L, N] bool.
      targets: [groups, L, N, ...] each.
    """
    del state, valid, targets

  # 4. gradient: of a microbatch. The core adds those of all groups in one fixed order.

  @abc.abstractmethod
  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the loss of a microbatch; the minibatch's loss is the sum over its microbatches.

    Args:
      params: to differentiate.
      state: without optimizer, replay and counters. `state.params` equals params, without a
        gradient.
      batch: divide by `batch.count`, not by the size of the microbatch, for a mean.
      key: PRNG key of the microbatch.
    """

  def gradient(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Params, Aux]:
    """Returns the gradient of `loss` by state.params."""
    def loss(params):
      # Running moments are in `params`, but no gradient may flow into them.
      return self.loss(running_moments.frozen(params), state, batch, key)
    return jax.grad(loss, has_aux=True)(state.params)

  # 5. update: a step of the optimizer, on the learner's mesh or in the centre.

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Returns the state with new params, opt_state and target; the core counts.

    Args:
      state: without replay.
      grads: summed over all groups.
      aux: summed over all groups, without priorities.
    """
    # Terms are sums. A minibatch without valid rows must not divide by zero.
    kl = aux.terms.get('approx_kl', 0.0) / jnp.maximum(aux.valid, 1.0)
    change, opt_state = self.optimizer.update(grads, state.opt_state, state.params, kl=kl)
    rate = self.learning_rate()
    params = jax.tree.map(lambda p, c: p - rate * c, state.params, change)
    return state._replace(params=params, opt_state=opt_state)

  def learning_rate(self) -> jax.Array:
    """Returns the factor of the optimizer's output, [] f32."""
    schedule = self.parts.optimizer.schedule(self.parts.total_steps)
    return schedule(counters.as_float(self.steps_done))

  def auxiliary(self) -> Auxiliary | None:
    """Returns a phase after every few updates, if the algorithm learns from rollouts; or None.

    The phase gets the `targets` of the updates. Its terms become metrics, which are 0 in updates
    without it, and must have other names. The core keeps the rollouts in the train state, in place
    of a replay, and lays them side by side, as if of more environments. It needs gradients and
    updates in one place, so not `dppo` or `rapid`.
    """
    return None

  # For losses.

  def unroll(self, params: Params, rollout: Rollout, action: jax.Array | None = None
             ) -> tuple[Any, ...]:
    """Applies the actor-critic to all rows of whole environments, from the carry that they have.

    Args:
      params: of the network.
      rollout: [T, N, ...], with T + 1 observations.
      action: rollout.action, for the outputs of auxiliary heads.

    Returns:
      dist_params [T + 1, N, K] and value [T + 1, N]; with `action` also the outputs of the heads by
      name, [T, N, ...].

    Raises:
      ValueError: the rollout consists of single rows.
    """
    chex.assert_rank(rollout.valid, 2)
    obs = frames.stacks(rollout.obs)
    if len(obs) != len(rollout.valid) + 1:
      raise ValueError(
          'unroll needs whole environments, with T + 1 observations of T rows; it got '
          f'{len(obs)} of {len(rollout.valid)}, as single rows have. Let items() return '
          'items.environments(self.parts.unroll_length), which is its default; or keep the rows, '
          'and call self.network.apply(params, rollout.obs, None, rollout.valid) in its place')
    # The rollout's carry has a leading axis [1], so that all its arrays can be cut by environment.
    carry = jax.tree.map(lambda x: x[0], rollout.carry)
    # The network takes T + 1 masks. The last one affects only the carry after the last row, which
    # is dropped; the last row has no action either, so its heads are cut.
    valid = jnp.concatenate([rollout.valid, rollout.valid[-1:]])
    if action is None:
      return self.network.apply(params, obs, carry, valid)[:2]
    action = jnp.concatenate([action, action[-1:]])
    outputs: Any = self.network.apply(params, obs, carry, valid, action)
    dist_params, value, _, heads = outputs
    return dist_params, value, jax.tree.map(lambda x: x[:-1], heads)


def problem_of_epsilon(algorithm: Algorithm, greedy: bool, epsilon: float) -> str:
  """Returns why evaluations cannot take a random action with a probability; '' if they can.

  Args:
    algorithm: that acts.
    greedy: evaluations take the most likely actions.
    epsilon: the probability.
  """
  if epsilon and algorithm.policy_reads != policies.ACTION_VALUES:
    return (f'{type(algorithm).__name__} explores in another way than by random actions in place '
            f'of greedy ones; must be 0, got {epsilon:g}')
  if epsilon and greedy:
    return f'a greedy evaluation takes no random action; must be 0, got {epsilon:g}'
  return ''


def weighted_loss(error: jax.Array, batch: Batch, terms: Metrics) -> tuple[jax.Array, Aux]:
  """Returns half the mean of squared TD errors, weighted by importance.

  Args:
    error: [N] f32, TD errors of a replay's items; the gradient flows through them.
    batch: the items' microbatch.
    terms: [N] each, further terms to log.

  Returns:
    The results of `Algorithm.loss`; |TD error| becomes the items' priority.
  """
  weight = batch.weight
  assert weight is not None, 'the items of a replay have weights'
  chex.assert_rank(error, 1)
  chex.assert_equal_shape([error, weight, *terms.values()])
  abs_td_error = jnp.abs(lax.stop_gradient(error))
  losses = 0.5 * weight * jnp.square(error)
  terms = terms | dict(loss=losses, abs_td_error=abs_td_error, importance_weight=weight)
  valid = jnp.sum(jnp.ones_like(abs_td_error))
  return jnp.sum(losses) / batch.count, Aux(jax.tree.map(jnp.sum, terms), valid, abs_td_error)
