"""PPO on Atari with 8 environments: CleanRL's setting (EnvPool, 2206.10558, table 3).

podracer_jit --config=configs/ppo_atari_8.py --workdir=runs/breakout_ppo_8

The environment is CleanRL's: no sticky actions, and for the loss the end of a life ends an episode.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('ppo', 'nature_cnn', 'adam', scheme='sync')
  config.env.task = 'Breakout-v5'
  config.env.num_envs = 8
  config.env.episodic_life = True
  config.env.reward_clip = True
  config.total_steps = 10_000_000
  config.unroll_length = 128
  config.num_minibatches = 4
  config.num_epochs = 4
  config.microbatch_rows = -1
  config.num_shards = 2
  config.num_grad_shards = 2
  config.loss.clip = 0.1
  config.loss.clip_value = True
  config.loss.value_coef = 0.5
  config.loss.entropy_coef = 0.01
  config.optimizer.learning_rate = 2.5e-4  # linearly to 0
  config.optimizer.eps = 1e-5
  config.optimizer.max_grad_norm = 0.5
  config.env.renew_every_updates = 2000
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 192
    config.unroll_length = 8
    config.network.hidden = 64
    config.microbatch_rows = 4
  return config
