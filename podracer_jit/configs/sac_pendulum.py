"""SAC on Pendulum, in a minute on a CPU core.

podracer_jit --config=configs/sac_pendulum.py --workdir=runs/sac_pendulum
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('sac', 'mlp', 'adam', scheme='apex_lockstep')
  config.total_steps = 20_000
  config.unroll_length = 8
  config.env.task = 'Pendulum-v1'
  config.env.num_envs = 4
  config.network.hidden = (64, 64)
  config.network.activation = 'relu'
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  config.optimizer.eps = 1e-8
  config.optimizer.max_grad_norm = 1e6  # none
  config.replay.capacity = 20_000
  config.replay.min_size = 1_000  # until then, actions are uniform
  config.replay.batch_size = 128
  config.replay.gradient_steps = 32  # one for each step
  config.replay.priority_exponent = 0.0
  config.env.renew_every_updates = 0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 400
    config.replay.capacity = 400
    config.replay.min_size = 100
    config.replay.batch_size = 32
    config.replay.gradient_steps = 4
  return config
