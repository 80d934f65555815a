"""IMPALA on CartPole, acting with the parameters of one update ago.

podracer_jit --config=configs/impala_cartpole.py --workdir=runs/impala_cartpole
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """`smoke` makes a few updates only."""
  config = experiment.config('impala', 'mlp', 'adam', scheme='cleanba')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.total_steps = 600_000
  config.unroll_length = 20
  config.num_minibatches = 2
  config.loss.discount = 0.98
  # Returns of a hundred and a torso that both heads share: the value must not drown the policy.
  config.loss.baseline_coef = 0.02
  config.optimizer.learning_rate = 2e-3
  config.optimizer.max_grad_norm = 40.0
  config.placement.xla_threads = 2  # more than there are cores is slower
  config.placement.env_threads = 1  # steps so short that threads of far cores are slower together
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
