"""PPO on MuJoCo with 64 environments: EnvPool's setting (2206.10558, table 5).

podracer_jit --config=configs/ppo_mujoco_fast.py --workdir=runs/ant --config.env.task=Ant-v4
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused')
  config.env.task = 'HalfCheetah-v4'
  config.env.num_envs = 64
  config.total_steps = 10_000_000
  config.unroll_length = 64
  config.num_minibatches = 4
  config.num_epochs = 2
  config.network.hidden = (64, 64)
  config.network.separate_critic = True
  config.normalise.obs = True
  config.normalise.reward = True
  config.loss.clip = 0.2
  config.loss.value_coef = 1.3
  config.loss.entropy_coef = 0.0
  config.optimizer.learning_rate = 2.95e-3  # linearly to 0
  config.optimizer.max_grad_norm = 3.5
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 10_000
  return config
