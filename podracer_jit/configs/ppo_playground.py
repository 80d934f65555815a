"""PPO on MuJoCo Playground: its DM Control tasks, as one program with the physics.

podracer_jit --config=ppo_playground --workdir=runs/balance

The config needs the extra `playground`. Like Playground's own PPO, it normalises observations, and
has the same discount and entropy bonus; Playground's batches are larger, for a GPU.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused')
  config.env.task = 'playground:CartpoleBalance'
  config.env.num_envs = 64
  config.total_steps = 2_000_000
  config.unroll_length = 32
  config.num_minibatches = 4
  config.num_epochs = 4
  config.network.hidden = (64, 64)
  config.network.separate_critic = True
  config.normalise.obs = True
  config.normalise.reward = True
  config.loss.discount = 0.995
  config.loss.clip = 0.2
  config.loss.value_coef = 0.5
  config.loss.entropy_coef = 0.01
  config.optimizer.learning_rate = 1e-3  # linearly to 0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 10_000
  return config
