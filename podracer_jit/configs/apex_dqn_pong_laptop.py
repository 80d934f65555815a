"""Ape-X DQN on Pong from pixels, on two CPU cores.

podracer_jit --config=configs/apex_dqn_pong_laptop.py --workdir=runs/apex_pong

Frames and convolutions are those of pong_laptop.py, with two streams of 128 units. Each core has
half of the environments and of the gradients. The replay has a tenth of the paper's capacity, and a
transition is drawn four times on average.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with `smoke` a run has a few small updates only, and a small replay."""
  config = experiment.config('dqn', 'nature_cnn', 'adam', scheme='apex_lockstep')
  config.total_steps = 2_000_000
  config.unroll_length = 16
  config.microbatch_rows = -1

  config.env.task = 'Pong-v5'
  config.env.num_envs = 16
  config.env.img_height = 42
  config.env.img_width = 42
  config.env.repeat_action_probability = 0.0
  config.env.noop_max = 30

  config.network.channels = (16, 32, 32)
  config.network.kernels = (3, 3, 3)
  config.network.strides = (3, 2, 1)
  config.network.hidden = 128
  config.network.centre = True  # otherwise up to half of the ReLUs never become active

  config.loss.target_every = 100
  config.replay.capacity = 200_000
  config.replay.min_size = 10_000
  config.replay.batch_size = 128
  config.replay.gradient_steps = 8
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  config.optimizer.max_grad_norm = 40.0

  config.num_shards = 2
  config.num_grad_shards = 2
  config.env.renew_every_updates = 500

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 640
    config.env.num_envs = 4
    config.microbatch_rows = 8
    config.loss.target_every = 25
    config.replay.capacity = 256
    config.replay.min_size = 128
    config.replay.batch_size = 32
  return config
