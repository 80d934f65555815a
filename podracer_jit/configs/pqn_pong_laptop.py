"""PQN on Pong from pixels, on two CPU cores.

podracer_jit --config=configs/pqn_pong_laptop.py --workdir=runs/pqn_pong

Frames and convolutions are those of pong_laptop.py, with layer normalisation. The rest is as in the
authors' config/alg/pqn_atari.yaml, but for what fits a short run with 32 environments instead of
128: 2M steps, 8 minibatches instead of 32, a learning rate that falls from 5e-4 instead of 2.5e-4
throughout, and a last epsilon of 0.01 instead of 0.001. Their frames are 84x84, a lost life ends an
episode and rewards are clipped; Pong has no lives, and rewards of 1 and -1.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with `smoke` a run has a few small updates only."""
  config = experiment.config('pqn', 'nature_cnn', 'radam', scheme='sync')
  config.total_steps = 2_000_000
  config.unroll_length = 32
  config.num_epochs = 2
  config.num_minibatches = 8
  config.microbatch_rows = -1

  config.env.task = 'Pong-v5'
  config.env.num_envs = 32
  config.env.img_height = 42
  config.env.img_width = 42
  config.env.repeat_action_probability = 0.0
  config.env.noop_max = 30

  config.network.channels = (16, 32, 32)
  config.network.kernels = (3, 3, 3)
  config.network.strides = (3, 2, 1)
  config.network.hidden = 128
  config.network.layer_norm = True

  config.loss.trace_lambda = 0.65
  config.loss.epsilon = 'linear:1:0.01:0.1'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.max_grad_norm = 10.0

  config.num_shards = 2
  config.num_grad_shards = 2
  config.env.renew_every_updates = 500

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 640
    config.env.num_envs = 4
    config.microbatch_rows = 8
  return config
