"""Pong from pixels on two CPU cores, in minutes.

podracer_jit --config=configs/pong_laptop.py --workdir=runs/pong

PPO with a small network on 42x42 frames. The first convolution has 3x3 patches that do not overlap,
so it is one matrix product. Each core is a virtual device that acts and learns with half of the
environments; this is faster than one program that spreads its operations over both cores.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('ppo', 'nature_cnn', 'adam', scheme='sync')
  config.total_steps = 2_000_000
  config.unroll_length = 128
  config.num_epochs = 3
  config.num_minibatches = 8
  config.microbatch_rows = -1

  config.env.task = 'Pong-v5'
  config.env.num_envs = 16
  config.env.img_height = 42
  config.env.img_width = 42

  config.network.channels = (16, 32, 32)
  config.network.kernels = (3, 3, 3)
  config.network.strides = (3, 2, 1)
  config.network.hidden = 256
  config.network.centre = True  # otherwise up to half of the ReLUs never become active

  config.loss.clip = 0.1
  config.loss.value_coef = 2.0
  config.loss.entropy_coef = 0.005
  config.optimizer.learning_rate = 2.5e-3
  config.optimizer.max_grad_norm = 1.0

  config.num_shards = 2
  config.num_grad_shards = 2
  config.env.renew_every_updates = 200

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 384
    config.env.num_envs = 4
    config.unroll_length = 32
    config.microbatch_rows = 4
  return config
