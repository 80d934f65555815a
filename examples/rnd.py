"""Random network distillation (1810.12894) on PPO, in one file with a task for it: DeepSea.

podracer_jit --config=examples/rnd.py --config.seed=1 --num_seeds=3 --workdir=runs/rnd

PPO beside it, with the same fields:

podracer_jit --config=examples/rnd.py --config.seed=1 --num_seeds=3 --workdir=runs/ppo \
    --config.loss.name=ppo --config.loss.discount=0.999 --config.loss.entropy_coef=0.001

Mean return of the last 100 training episodes after 300,000 steps (15,000 episodes) on a sea of
20 x 20, and the steps after which it exceeds 0.5. The best return is 0.99; an agent that acts at
random finds the treasure once in 2^20 episodes.

| seed | RND | steps to 0.5 | PPO |
|---|---|---|---|
| 1 | 0.99 | 190,000 | 0.00 |
| 2 | 0.99 | 176,000 | 0.00 |
| 3 | 0.98 | 141,000 | 0.00 |

Three seeds in one program took 52 s on one core of a Xeon, those of PPO 19 (commit c078e65).

| setting | paper | section | option |
|---|---|---|---|
| weights of rewards and bonuses | 2 and 1 | table 5 | `loss.extrinsic_coef`, `.intrinsic_coef` |
| their discounts | 0.999 and 0.99 | table 5 | `loss.discount`, `.intrinsic_discount` |
| bonuses do not end with an episode | | 2.3 | |
| bonuses in deviations of intrinsic returns | | 2.4 | |
| observations in deviations, clipped | at 5 | 2.4, table 4 | |
| rows that the predictor learns from | 0.25 | table 5 | `loss.predictor_share` |
| environments, rollout length | 128, 128 | table 5 | `env.num_envs`, `unroll_length` |
| minibatches, epochs | 4, 4 | table 5 | `num_minibatches`, `num_epochs` |
| lambda, clip range, entropy bonus | 0.95, 0.1, 0.001 | table 5 | `loss.gae_lambda`, `.clip`, \
`.entropy_coef` |
| learning rate of Adam | 1e-4 | table 5 | `optimizer.learning_rate` |

What differs from the authors' program (openai/random-network-distillation):

- Moments of an update normalise from the next update on. The first update does not normalise
  observations; their program begins with observations of a random agent.
- Bonuses are in deviations of intrinsic returns, which go on from the rollout's end with the
  intrinsic value; theirs are in deviations of discounted sums of past bonuses.
- The networks of the bonus see a stack of frames as a whole; theirs see the newest frame.
- The predictor learns from the observations of rows; theirs from those after the rows.
- Its loss is a sum over the drawn rows divided by their expected number, not by their number.
- Advantages are normalised and gradients clipped, as PPO does here; theirs are not.
- The losses of both values weigh half as much, unless `loss.value_coef` is 1.
- Minibatches have rows of all environments, drawn anew in each epoch; theirs have whole
  environments in a fixed order.
- Adam's epsilon is 1e-5 (`optimizer.eps`); theirs is 1e-8.
- All networks have the config's torso. Theirs are convolutional, with leaky ReLUs in the networks
  of the bonus and further layers in the policy's.
- A truncated episode is bootstrapped from its last observation.
- The config below is for DeepSea: its sizes and rate were chosen here.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import lax

from podracer_jit import experiment
from podracer_jit.agents import action_masks, running_moments
from podracer_jit.agents.networks import features_of
from podracer_jit.envs import frames
from podracer_jit.losses import PPO, gae, lambda_returns
from podracer_jit.losses.algorithm import Aux, Batch
from podracer_jit.options import option
from podracer_jit.types import Params, Rollout, TrainState

CLIP = 5.0  # bound of the normalised observations, in standard deviations


class Embedding(nn.Module):
  """Embeds observations [N, ...] as vectors [N, size]."""

  torso: nn.Module
  size: int
  layers: int  # between the torso and the last layer

  @nn.compact
  def __call__(self, obs):
    x = features_of(self.torso, obs)
    for _ in range(self.layers):
      x = nn.relu(nn.Dense(self.size)(x))
    return nn.Dense(self.size)(x)


class Value(nn.Module):
  """A second value of the features [N, F]."""

  @nn.compact
  def __call__(self, features, action):
    return nn.Dense(1)(features)[:, 0]


@dataclasses.dataclass(frozen=True)
class RND(PPO):
  """PPO with a bonus for observations that a predictor of a random network errs on."""

  takes = frozenset({'separate_critic'})
  targets_read_all_obs = True

  extrinsic_coef: float = option(2.0, 'weight of the advantages of rewards', at_least=0)
  intrinsic_coef: float = option(1.0, 'weight of the advantages of bonuses', at_least=0)
  intrinsic_discount: float = option(0.99, 'discount of future bonuses', at_least=0, at_most=1)
  predictor_share: float = option(0.25, 'share of the rows that the predictor learns from',
                                  at_least=0, at_most=1, above=0)
  embedding: int = option(512, 'numbers that are predicted of an observation', at_least=1)

  @property
  def random(self) -> Embedding:
    """The network whose output is predicted."""
    return Embedding(self.parts.torso, self.embedding, layers=0)

  @property
  def predictor(self) -> Embedding:
    """The network that predicts it."""
    return Embedding(self.parts.torso, self.embedding, layers=2)

  def heads(self) -> dict[str, nn.Module]:
    """Returns the head of the intrinsic value."""
    return {'intrinsic_value': Value()}

  def init(self, key: jax.Array) -> Params:
    """Returns the network and the predictor, with moments of what the bonus needs.

    Raises:
      ValueError: the network takes observations apart, whose parts cannot be standardised.
    """
    if getattr(self.parts.torso, 'needs_parts', False):
      raise ValueError(f'network.name: {type(self.parts.torso).__name__} takes observations apart, '
                       'and the bonus is that of standardised ones; mlp and nature_cnn can')
    shape = action_masks.seen(self.parts.spec).obs_shape
    params = super().init(key)
    moments = {'obs': running_moments.initial(shape),
               'intrinsic_return': running_moments.initial(())}
    predictor = self.predictor.init(jax.random.fold_in(key, 1), jnp.zeros((1, *shape)))
    return params | {'predictor': predictor, 'moments': moments | params.get('moments', {})}

  def init_target(self, params: Params) -> Params:
    """Returns the random network. The bits of a weight are its key, so each seed has another."""
    weight = params['predictor']['params']['Dense_0']['kernel'][0, 0]
    key = jax.random.key(lax.bitcast_convert_type(weight, jnp.int32))
    return self.random.init(key, jnp.zeros((1, *action_masks.seen(self.parts.spec).obs_shape)))

  def acting(self, state: TrainState) -> Params:
    """Returns the network without the predictor."""
    return {name: x for name, x in state.params.items() if name != 'predictor'}

  def bonus(self, params: Params, state: TrainState, obs: jax.Array) -> jax.Array:
    """Returns the predictor's squared errors [T, N] on observations [T, N, ...].

    Args:
      params: of the predictor.
      state: with the random network, and moments of observations.
      obs: as the task gives them.
    """
    rows = action_masks.split(obs.reshape(-1, *obs.shape[2:]), self.parts.spec)[0]
    moments = running_moments.moments_of(state.params)['obs']
    rows = running_moments.standardise(moments, running_moments.as_numbers(rows))
    rows = jnp.clip(rows, -CLIP, CLIP)
    error = (self.predictor.apply(params['predictor'], rows)
             - self.random.apply(state.target.params, rows))
    return jnp.mean(jnp.square(error), axis=-1).reshape(obs.shape[:2])

  def targets(self, state: TrainState, rollout: Rollout) -> dict[str, jax.Array]:
    """Returns PPO's targets with the sum of both advantages, and those of the bonus, [T, N] each.

    Bonuses do not end with an episode (section 2.3), so a reset is a step like any other.
    """
    of_rewards = super().targets(state, rollout)
    obs = frames.stacks(rollout.obs)
    action = jnp.concatenate([rollout.action, rollout.action[-1:]])
    value = self.network.apply(state.params, obs, None, None, action)[3]['intrinsic_value']
    bonus = self.bonus(state.params, state, obs[1:])
    std = running_moments.deviation(
        running_moments.moments_of(state.params)['intrinsic_return'])
    discount = jnp.full(bonus.shape, self.intrinsic_discount)
    never = jnp.zeros(bonus.shape, bool)

    def each(function, *args):
      return jax.vmap(function, in_axes=1, out_axes=1)(*args)

    returns = each(lambda *a: lambda_returns(*a, 1.0), value[1:] * std, bonus, discount, never)
    advantage = each(lambda *a: gae(*a, self.gae_lambda), value, bonus / std, discount, never)
    return {
        'advantage': (self.extrinsic_coef * of_rewards['advantage']
                      + self.intrinsic_coef * advantage),
        'value_target': of_rewards['value_target'],
        'intrinsic_target': advantage + value[:-1],
        'intrinsic_return': returns}

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns PPO's loss, and those of intrinsic value and predictor; see `Algorithm.loss`.

    The last observations of episodes, which are in invalid rows, count for these two.
    """
    loss, aux = super().loss(params, state, batch, key)
    rows = batch.items
    value = self.network.apply(params, rows.obs, None, None, rows.action)[3]['intrinsic_value']
    value_loss = 0.5 * jnp.square(value - batch.targets['intrinsic_target'])
    bonus = self.bonus(params, state, rows.obs)
    learned = jax.random.bernoulli(key, self.predictor_share, bonus.shape) / self.predictor_share
    loss += jnp.sum(self.value_coef * value_loss + learned * bonus) / batch.count
    terms = Aux.of({'intrinsic_value_loss': value_loss, 'bonus': bonus}, rows.valid).terms
    return loss, aux._replace(terms=aux.terms | terms)


class State(NamedTuple):
  """Cell of the diver, [] i32 each."""

  row: jax.Array
  column: jax.Array


class DeepSea:
  """A diver sinks by a row a step; only `size` steps to the right reach the treasure (1908.03568).

  Which action goes right differs from cell to cell. A step to the right costs 0.01 / size, the
  treasure is 1.
  """

  def __init__(self, size: int = 20):
    """`--config.env.size=10` makes the sea 10 x 10."""
    self.size = size
    self.observation_space = spaces.Box(0, 1, (size, size), np.uint8)
    self.action_space = spaces.Discrete(2)
    self.max_episode_steps = None
    self.right = np.random.default_rng(0).integers(2, size=(size, size), dtype=np.int32)

  def reset(self, key):
    """Begins in the upper left cell."""
    state = State(jnp.int32(0), jnp.int32(0))
    return self._observe(state), state

  def step(self, key, state, action):
    """Moves the diver to the left or right, and down."""
    goes_right = action == jnp.asarray(self.right)[state.row, state.column]
    is_treasure = goes_right & (state.column == self.size - 1)
    reward = is_treasure - 0.01 / self.size * goes_right
    column = jnp.clip(state.column + jnp.where(goes_right, 1, -1), 0, self.size - 1)
    state = State(state.row + 1, column)
    return self._observe(state), state, reward, state.row == self.size, False, {}

  def _observe(self, state):
    """Returns a plane with the diver, which is empty at the end, [size, size] u8."""
    return jnp.zeros((self.size, self.size), jnp.uint8).at[state].set(1, mode='drop')


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('rnd:RND', 'mlp', 'adam', scheme='fused')
  config.env.task = 'rnd:DeepSea'
  config.env.num_envs = 64
  config.network.hidden = (128,)
  config.network.activation = 'relu'
  config.unroll_length = 80
  config.num_epochs = config.num_minibatches = 4
  config.total_steps = 10_000 if 'smoke' in experiment.arguments(arg, 'smoke') else 300_000
  config.loss.discount = 0.999
  config.loss.embedding = 64
  config.loss.entropy_coef = 0.001
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  return config
