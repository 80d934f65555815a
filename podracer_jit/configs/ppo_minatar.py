"""PPO on MinAtar with PureJaxRL's settings for gymnax's games, in one program.

podracer_jit --config=configs/ppo_minatar.py --workdir=runs/ppo_minatar
podracer_jit --config=configs/ppo_minatar.py --workdir=runs/ppo_seeds --num_seeds=10

The settings are those of PureJaxRL's notebook examples/brax_minatar.ipynb. One thing differs: a
return that the time limit cuts is bootstrapped here, and ends there.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused')
  config.env.task = 'gymnax:Breakout-MinAtar'
  config.env.num_envs = 64
  config.total_steps = 10_000_000
  config.unroll_length = 128
  config.num_minibatches = 8
  config.num_epochs = 4
  config.microbatch_rows = -1
  config.network.hidden = (64, 64)
  config.network.activation = 'relu'
  config.network.separate_critic = True
  config.loss.clip = 0.2
  config.loss.clip_value = True
  config.loss.value_coef = 0.5
  config.loss.entropy_coef = 0.01
  config.optimizer.learning_rate = 5e-3  # linearly to 0
  config.optimizer.max_grad_norm = 0.5
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 5_000
    config.env.num_envs = 16
    config.unroll_length = 32
  return config
