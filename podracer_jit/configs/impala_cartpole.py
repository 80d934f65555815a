"""IMPALA on CartPole, acting with the parameters of one update ago.

podracer_jit --config=configs/impala_cartpole.py --workdir=runs/impala_cartpole
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('impala', 'mlp', 'adam', scheme='cleanba')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.total_steps = 600_000
  config.unroll_length = 20
  config.num_minibatches = 2
  config.loss.discount = 0.98
  # The heads share a torso and returns are large, so a larger weight would drown the policy loss.
  config.loss.baseline_coef = 0.02
  config.optimizer.learning_rate = 2e-3
  config.optimizer.max_grad_norm = 40.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
