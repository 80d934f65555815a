"""R2D2 with a GRU on a task that needs memory: MiniGrid's RedBlueDoors, 6 x 6.

podracer_jit --config=configs/r2d2_memory.py --workdir=runs/r2d2_memory

See impala_memory.py for the task. Without memory: --config.network.core=none
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with `smoke` a run has a few small updates only, and a small replay."""
  config = experiment.config('r2d2', 'image_and_vector', 'adam', scheme='apex_lockstep')
  config.total_steps = 1_000_000
  config.unroll_length = 16
  config.env.task = 'MiniGrid-RedBlueDoors-6x6-v0'
  config.env.num_envs = 32
  config.network.largest = 10.0
  config.network.channels = (16,)
  config.network.image_hidden = 64
  config.network.vector_hidden = (32,)
  config.network.core = 'gru'
  config.network.core_size = 128
  config.loss.discount = 0.99
  # Rewards are rare, so actions are random at first, and returns reach back quickly.
  config.loss.epsilon = 'linear:1:0.4:0.3'
  config.loss.epsilon_alpha = 3.0
  config.loss.n_step = 8
  config.loss.burn_in = 8
  config.loss.trace_length = 24
  config.loss.target_every = 10
  config.replay.capacity = 10_000  # sequences of 16 new rows
  config.replay.min_size = 500
  config.replay.batch_size = 32
  config.replay.gradient_steps = 4
  config.replay.priority_exponent = 0.9
  config.replay.importance_exponent = 0.6
  config.optimizer.learning_rate = 5e-4
  config.optimizer.anneal = False
  config.optimizer.eps = 1e-8  # gradients are small
  config.optimizer.max_grad_norm = 40.0
  config.env.renew_every_updates = 0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 6_000
    config.replay.capacity = 256
    config.replay.min_size = 32
    config.replay.batch_size = 8
    config.replay.gradient_steps = 1
  return config
