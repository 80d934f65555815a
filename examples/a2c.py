"""Advantage actor-critic, an algorithm of one's own in one file, on CartPole.

podracer_jit --config=examples/a2c.py --workdir=runs/a2c
"""

import dataclasses

import jax
import jax.numpy as jnp
import rlax

from podracer_jit import experiment
from podracer_jit.losses.algorithm import Algorithm, Aux, Batch
from podracer_jit.options import option
from podracer_jit.types import Params, TrainState, discounts


@dataclasses.dataclass(frozen=True)
class A2C(Algorithm):
  """Policy gradients with n-step returns (1602.01783, section 4)."""

  value_coef: float = option(0.5, 'weight of the value loss', at_least=0)
  entropy_coef: float = option(0.01, 'weight of the entropy bonus')

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns the loss summed over valid rows. Args and results: see `Algorithm.loss`."""
    rollout = batch.items
    dist_params, value = self.unroll(params, rollout)

    # Returns are bootstrapped from the last row, and from the last observation of an episode.
    goes_on = 1.0 - (rollout.terminated | rollout.truncated).astype(jnp.float32)
    returns = jax.vmap(rlax.lambda_returns, in_axes=1, out_axes=1)(
        rollout.reward, discounts(rollout, self.discount), value[1:], goes_on)
    advantage = jax.lax.stop_gradient(returns) - value[:-1]

    policy = self.parts.policy
    log_prob = policy.log_prob(dist_params[:-1], rollout.action)
    aux = Aux.of({
        'policy_loss': -log_prob * jax.lax.stop_gradient(advantage),
        'value_loss': 0.5 * jnp.square(advantage),
        'entropy': policy.entropy(dist_params[:-1])}, rollout.valid)
    loss = (aux.terms['policy_loss'] + self.value_coef * aux.terms['value_loss']
            - self.entropy_coef * aux.terms['entropy'])
    return loss, aux


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('a2c:A2C', 'mlp', 'adam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.unroll_length = 8
  config.total_steps = 600_000
  config.loss.value_coef = 0.02  # the torso is shared, and returns are large
  config.loss.discount = 0.98
  config.optimizer.learning_rate = 2e-3
  config.optimizer.max_grad_norm = 40.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
