"""Three algorithms on tasks of any kind, with one network.

podracer_jit sweep --config=examples/compare.py:ppo --config=examples/compare.py:impala \
    --config=examples/compare.py:vmpo --seeds=1:3 --out=runs/compare \
    --tasks=Catch-v0,CartPole-v1,LunarLander-v2,Hopper-v4,Pong-v5
podracer_jit report runs/compare --out=report

No setting was chosen for a task: for one task alone, its own config learns faster.
"""

from typing import Any

import flax.linen as nn
import jax

from podracer_jit import experiment
from podracer_jit.agents.networks import MLP, NatureCNN
from podracer_jit.options import internal


class AnyTask(nn.Module):
  """Convolutions on images, an MLP on other observations."""

  channels_last: bool = internal(False)
  dtype: Any = internal(None)

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns features [N, F] of observations [N, ...]."""
    if obs.ndim < 4:
      return MLP((64, 64), dtype=self.dtype)(obs)
    # The first patches do not overlap, so that a CPU needs one matrix product for them.
    cnn = NatureCNN(channels=(16, 32), kernels=(6, 4), strides=(6, 2), hidden=128, centre=True,
                    channels_last=self.channels_last, dtype=self.dtype)
    return cnn(obs)


def get_config(arg: str = ''):
  """Returns the config of an algorithm: `ppo`, `impala` or `vmpo`."""
  args = experiment.arguments(arg, 'ppo', 'impala', 'vmpo', 'smoke')
  name = next((each for each in ('impala', 'vmpo') if each in args), 'ppo')
  loss = 'vmpo:VMPO' if name == 'vmpo' else name
  config = experiment.config(loss, 'compare:AnyTask', 'adam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 16
  config.total_steps = 400_000
  config.normalise.reward = True  # one size of returns for all tasks
  config.loss.discount = 0.99
  config.optimizer.learning_rate = 1e-3  # linearly to 0
  config.optimizer.max_grad_norm = 1.0
  if name == 'ppo':
    config.unroll_length = 128
    config.num_epochs = 3
    config.num_minibatches = 8
    config.loss.entropy_coef = 0.005
  if name == 'impala':
    config.unroll_length = 20
    config.loss.entropy_coef = 0.005
  if name == 'vmpo':
    config.unroll_length = 20
    config.loss.alpha = 1.0
  if 'smoke' in args:
    config.total_steps = 5_000
  return config
