"""PPO with NAPPO's setting for Obstacle Tower (2007.02622, section 4.2).

podracer_jit --config=examples/obstacle_tower.py --config.env.task=my_envs:Tower \
    --workdir=runs/tower

The environment, a Unity program of 2019, cannot be had from a package registry. Its task is a
Gymnasium class of your own, whose observations are images [H, W, C] or [C, H, W]: the paper repeats
each action twice, stacks 4 frames, has 6 actions, and adds to the rewards for keys and boxes.

The paper trains by `rapid` on two machines. Its learning rate is a quarter of 4e-4 from
100 million steps on, and a quarter of that from 400 million on.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('ppo', 'fixup_resnet', 'adam', scheme='rapid')
  config.env.task = 'my_envs:Tower'
  config.env.num_envs = 16
  config.total_steps = 500_000_000
  config.unroll_length = 800
  config.num_minibatches = 8  # of 1,600 steps
  config.num_epochs = 2
  config.network.core = 'gru'
  config.network.core_size = 256
  config.loss.clip = 0.15
  config.loss.discount = 0.99
  config.loss.entropy_coef = 0.01
  config.loss.gae_lambda = 0.95
  config.loss.value_coef = 0.2
  config.optimizer.anneal = False
  config.optimizer.learning_rate = 'piecewise:4e-4:100000000steps=1e-4:400000000steps=2.5e-5'
  config.num_shards = 2
  config.num_grad_shards = 2  # at most two workers of gradients
  config.microbatch_rows = -1
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.unroll_length = 4
    config.total_steps = 128
    config.network.hidden = 32
    config.network.core_size = 32
  return config
