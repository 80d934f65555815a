"""IMPALA on Catch, which it learns in half a minute: a first look at the package.

podracer_jit --config=configs/impala_catch.py --workdir=runs/catch
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('impala', 'mlp', 'adam', scheme='cleanba')
  config.env.task = 'Catch-v0'
  config.env.num_envs = 32
  config.total_steps = 300_000
  config.unroll_length = 20
  config.num_minibatches = 2
  config.optimizer.learning_rate = 1e-3
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
