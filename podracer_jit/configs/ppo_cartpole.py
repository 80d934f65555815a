"""PPO on CartPole: the `fused` scheme, one program with no Python between updates.

podracer_jit --config=configs/ppo_cartpole.py --workdir=runs/cartpole
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 16
  config.total_steps = 400_000
  config.unroll_length = 64
  config.num_minibatches = 4
  config.num_epochs = 4
  config.microbatch_rows = -1
  config.loss.clip = 0.2
  config.loss.discount = 0.98
  # The heads share a torso and returns are large, so a larger weight would drown the policy loss.
  config.loss.value_coef = 0.02
  config.loss.entropy_coef = 0.0
  config.optimizer.learning_rate = 2e-3
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
