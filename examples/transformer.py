"""A transformer torso and an auxiliary loss of one's own, in one file: A2C on MiniGrid.

podracer_jit --config=examples/transformer.py --workdir=runs/transformer

The loss of A2C (1602.01783, section 4) gets another term: the features must predict how an action
changes the observation, which is the task "dynamics" of "Loss is its own reward" (1612.07307).
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import rlax

from podracer_jit import experiment
from podracer_jit.envs.protocol import take_apart
from podracer_jit.losses.algorithm import Algorithm, Aux
from podracer_jit.options import internal, option
from podracer_jit.types import discounts

KINDS = 11  # MiniGrid has at most so many objects, colours and states of objects


class Cells(nn.Module):
  """A transformer (1706.03762) on the cells of the image in a dict of observations."""

  needs_parts = True
  width: int = option(32, 'features of each cell', at_least=1)
  layers: int = option(1, 'layers of attention', at_least=1)
  parts: tuple = internal(())

  @nn.compact
  def __call__(self, obs):
    image = next(x for x in take_apart(obs, self.parts).values() if x.ndim == 4)
    cells = jax.nn.one_hot(image.reshape(len(obs), -1, image.shape[-1]), KINDS)
    x = nn.Dense(self.width)(cells.reshape(*cells.shape[:2], -1))
    x = jnp.concatenate([jnp.zeros((len(obs), 1, self.width)), x], axis=1)  # first a summary
    x += self.param('position', nn.initializers.normal(0.5), x.shape[1:])
    for _ in range(self.layers):
      q, k, v = jnp.split(nn.Dense(3 * self.width)(nn.LayerNorm()(x)), 3, axis=-1)
      weights = jax.nn.softmax(q @ k.mT / self.width**0.5)
      x += nn.Dense(self.width)(weights @ v)
      x += nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
    return nn.LayerNorm()(x)[:, 0]


class Prediction(nn.Module):
  """Predicts the change of observations [N, size] from features [N, F] and actions [N]."""

  num_actions: int
  size: int

  @nn.compact
  def __call__(self, features, action):
    x = jnp.concatenate([features, jax.nn.one_hot(action, self.num_actions)], axis=1)
    return nn.Dense(self.size)(nn.relu(nn.Dense(128)(x)))


@dataclasses.dataclass(frozen=True)
class PredictiveA2C(Algorithm):
  """Policy gradients with n-step returns, and an auxiliary loss."""

  value_coef: float = option(0.5, 'weight of the value loss', at_least=0)
  entropy_coef: float = option(0.003, 'weight of the entropy bonus')
  prediction_coef: float = option(0.05, 'weight of the auxiliary loss', at_least=0)

  def heads(self):
    spec = self.parts.spec
    return {'change': Prediction(spec.num_actions, *spec.obs_shape)}

  def loss(self, params, state, batch, key):
    rollout = batch.items
    dist_params, value, heads = self.unroll(params, rollout, rollout.action)
    goes_on = 1.0 - (rollout.terminated | rollout.truncated).astype(jnp.float32)
    returns = jax.vmap(rlax.lambda_returns, in_axes=1, out_axes=1)(
        rollout.reward, discounts(rollout, self.discount), value[1:], goes_on)
    advantage = jax.lax.stop_gradient(returns) - value[:-1]
    policy = self.parts.policy
    change = jnp.diff(rollout.obs.astype(jnp.float32), axis=0)
    aux = Aux.of({
        'policy_loss': (-policy.log_prob(dist_params[:-1], rollout.action)
                        * jax.lax.stop_gradient(advantage)),
        'value_loss': 0.5 * jnp.square(advantage),
        'entropy': policy.entropy(dist_params[:-1]),
        'prediction_loss': jnp.mean(jnp.square(heads['change'] - change), axis=-1)}, rollout.valid)
    terms = aux.terms
    loss = (terms['policy_loss'] + self.value_coef * terms['value_loss'] - self.entropy_coef
            * terms['entropy'] + self.prediction_coef * terms['prediction_loss'])
    return loss, aux


def get_config(arg: str = ''):
  """`smoke` makes a few updates only."""
  config = experiment.config('transformer:PredictiveA2C', 'transformer:Cells', 'adam')
  config.env = dict(task='MiniGrid-Empty-Random-6x6-v0', num_envs=32)
  config.unroll_length = 16
  config.total_steps = 5_000 if 'smoke' in experiment.arguments(arg, 'smoke') else 150_000
  config.optimizer.learning_rate = 2e-3
  return config
