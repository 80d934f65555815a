"""Ape-X DQN on Catch: solved in seconds.

podracer_jit --config=configs/apex_dqn_catch.py --workdir=runs/apex_catch
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('dqn', 'mlp', 'adam', scheme='apex_lockstep')
  config.env.task = 'Catch-v0'
  config.env.num_envs = 16
  config.total_steps = 100_000
  config.unroll_length = 8
  config.loss.target_every = 100
  config.replay.capacity = 20_000
  config.replay.min_size = 1_000
  config.replay.batch_size = 128
  config.replay.gradient_steps = 2
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  config.optimizer.max_grad_norm = 40.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
