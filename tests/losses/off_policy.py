"""A small config of SAC or TD3, a batch for their losses, and their networks in NumPy."""

import jax
import numpy as np

from podracer_jit.losses.algorithm import Batch
from podracer_jit.types import Transition
from tests.runs import changed, small

N = 6


def config_of(loss, **fields):
  """Returns a small config on Pendulum, with a replay that fills in two updates."""
  config = changed(small(loss, 'Pendulum-v1'), num_minibatches=1, network__hidden=(8,),
                   network__activation='relu')
  config['replay'] |= dict(capacity=256, min_size=64, batch_size=16, gradient_steps=2,
                           priority_exponent=0.0)
  return changed(config, **fields)


def batch():
  """Returns N transitions of Pendulum with random weights, of which some are terminal."""
  rng = np.random.default_rng(1)
  transition = Transition(
      obs=np.float32(rng.normal(size=(N, 3))), action=np.float32(rng.uniform(-1, 1, (N, 1))),
      reward=np.float32(rng.normal(size=N)), discount=np.float32(0.9 * (rng.random(N) < 0.7)),
      next_obs=np.float32(rng.normal(size=(N, 3))))
  weight = np.float32(rng.uniform(0.5, 1, N))
  return Batch(transition, None, weight, np.float32(N), None)


def mlp(params, x):
  """Returns the outputs of a torso of one ReLU layer and of the head that follows it."""
  params = params['params']
  hidden = np.maximum(x @ params['torso']['Dense_0']['kernel'] + params['torso']['Dense_0']['bias'],
                      0)
  return hidden @ params['Dense_0']['kernel'] + params['Dense_0']['bias']


def q(params, obs, action):
  """Returns the values of all critics, [critics, N]."""
  x = np.concatenate([obs, action], axis=-1)
  return np.stack([mlp(jax.tree.map(np.float64, of_one), x)[:, 0] for of_one in params])
