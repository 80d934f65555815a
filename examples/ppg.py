"""Phasic policy gradient (2009.04416) on PPO, in one file, on CartPole.

podracer_jit --config=examples/ppg.py --workdir=runs/ppg

Ten seeds had a greedy return of 500, the best, after 200,000 steps (docs/results.md).

| setting | paper | section | option |
|---|---|---|---|
| networks of policy and value | apart | 2.1 | `network.separate_critic` |
| N_pi, updates from phase to phase | 32 | appendix A | `loss.policy_updates` |
| E_pi and E_V, epochs of an update | 1 and 1 | appendix A | `num_epochs` |
| E_aux, epochs of a phase | 6 | appendix A | `loss.aux_epochs` |
| beta_clone | 1 | appendix A | `loss.beta_clone` |
| minibatches of an update | 8 | appendix A | `num_minibatches` |
| of an epoch of the phase, for each update | 16 | appendix A | `loss.aux_minibatches` |
| environments, rollout length | 4 x 64, 256 | appendix A | `env.num_envs`, `unroll_length` |
| discount, lambda | 0.999, 0.95 | appendix A | `loss.discount`, `.gae_lambda` |
| clip, entropy bonus | 0.2, 0.01 | appendix A | `loss.clip`, `.entropy_coef` |
| rewards are normalised | yes | appendix A | `normalise.reward` |
| learning rate of Adam | 5e-4 | appendix A | `optimizer.learning_rate` |

What differs from the authors' program (openai/phasic-policy-gradient):

- Policy and value take the same number of epochs.
- The phase goes on with the moments of Adam; their program has a second Adam for it.
- Advantages are normalised over a minibatch, not over the rollouts of an update.
- The loss of the value weighs half as much, unless `loss.value_coef` is 1.
- Gradients are clipped, and Adam's epsilon is 1e-5 (`optimizer`). Theirs has no clipping, and 1e-8.
- A minibatch of the phase has rows of all rollouts; theirs has whole rollouts of 16 environments.
- A truncated episode is bootstrapped from its last observation.
- The config below is for CartPole: its sizes, rate, discount (0.99), clip (0.1) and number of
  updates between phases were chosen here.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer_jit import experiment
from podracer_jit.agents import running_moments
from podracer_jit.losses import PPO
from podracer_jit.losses.algorithm import Aux, Auxiliary, Batch
from podracer_jit.options import option
from podracer_jit.types import Params, TrainState


class Value(nn.Module):
  """A value of the policy's features [N, F]."""

  @nn.compact
  def __call__(self, features, action):
    return nn.Dense(1)(features)[:, 0]


@dataclasses.dataclass(frozen=True)
class PPG(PPO):
  """PPO, and a phase that distils the value function into the policy's features (algorithm 1)."""

  takes = frozenset({'separate_critic'})

  policy_updates: int = option(32, 'N_pi, updates from one auxiliary phase to the next', at_least=1)
  aux_epochs: int = option(6, 'E_aux, epochs of an auxiliary phase', at_least=1)
  aux_minibatches: int = option(16, 'minibatches of an epoch for each of the updates', at_least=1)
  beta_clone: float = option(1.0, 'weight of the divergence from the policy before the phase',
                             at_least=0)

  def make_network(self) -> nn.Module:
    """Returns PPO's network.

    Raises:
      ValueError: policy and value share layers, which the phase is for.
    """
    if not self.parts.torso_options.separate_critic:
      raise ValueError('network.separate_critic: must be True')
    return super().make_network()

  def heads(self) -> dict[str, nn.Module]:
    """Returns the auxiliary value head of the policy's network."""
    return {'auxiliary_value': Value()}

  def init_target(self, params: Params) -> Params:
    """Returns the network before an auxiliary phase."""
    return {'params': params['params']}

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step of the policy phase, after which an auxiliary phase may begin."""
    state = super().update(state, grads, aux)
    return state.with_target(self.init_target(state.params))

  def auxiliary(self) -> Auxiliary:
    """Returns the auxiliary phase."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return Auxiliary(Distillation(**fields), self.policy_updates, self.aux_epochs,
                     self.aux_minibatches * self.policy_updates)


@dataclasses.dataclass(frozen=True)
class Distillation(PPG):
  """The auxiliary phase of PPG (section 2.1)."""

  measures_kl = False

  def auxiliary(self) -> None:
    """A phase has none."""

  def statistics(self, state: TrainState, valid: jax.Array, targets: dict[str, jax.Array]) -> None:
    """Returns none."""

  def loss(self, params: Params, state: TrainState, batch: Batch, key: jax.Array
           ) -> tuple[jax.Array, Aux]:
    """Returns L_joint and L_value, added; see `Algorithm.loss`."""
    rows = batch.items
    before = running_moments.with_moments_of(state.target.params, state.params)
    old, *_ = self.network.apply(before, rows.obs, None, None)
    new, value, _, heads = self.network.apply(params, rows.obs, None, None, rows.action)

    unit = self.unit_of_values(params)

    def loss_of(value):
      return 0.5 * jnp.square((value - batch.targets['value_target']) * unit)

    aux = Aux.of({'distillation_loss': loss_of(heads['auxiliary_value']),
                  'clone_kl': self.parts.policy.kl(old, new), 'aux_value_loss': loss_of(value)},
                 rows.valid)
    loss = (aux.terms['distillation_loss'] + self.beta_clone * aux.terms['clone_kl']
            + aux.terms['aux_value_loss'])
    return loss / batch.count, aux

  def update(self, state: TrainState, grads: Params, aux: Aux) -> TrainState:
    """Takes a step; the network before the phase stays."""
    return PPO.update(self, state, grads, aux)


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppg:PPG', 'mlp', 'adam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.network.separate_critic = True
  config.unroll_length = 32
  config.num_epochs = 1
  config.num_minibatches = 8
  config.normalise.reward = True
  config.loss.policy_updates = 8
  config.total_steps = 10_000 if 'smoke' in experiment.arguments(arg, 'smoke') else 200_000
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  return config
