"""PPO on MuJoCo: Schulman et al.'s setting of a million steps (1707.06347, table 3).

podracer_jit --config=configs/ppo_mujoco.py --workdir=runs/cheetah --config.env.task=Hopper-v4

As in openai/baselines, observations and rewards are normalised, and the learning rate falls
linearly to 0.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused')
  config.env.task = 'HalfCheetah-v4'
  config.env.num_envs = 1
  config.total_steps = 1_000_000
  config.unroll_length = 2048
  config.num_minibatches = 32
  config.num_epochs = 10
  config.network.hidden = (64, 64)
  config.network.separate_critic = True
  config.normalise.obs = True
  config.normalise.reward = True
  config.loss.clip = 0.2
  config.loss.clip_value = True
  config.loss.value_coef = 0.5
  config.loss.entropy_coef = 0.0
  config.optimizer.learning_rate = 3e-4
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
  return config
