"""PPO on Pong with 64 environments: EnvPool's tuned setting (2206.10558, table 4).

podracer_jit --config=configs/ppo_pong_envpool.py --workdir=runs/pong_envpool

The environment is CleanRL's: no sticky actions, and for the loss the end of a life ends an episode.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('ppo', 'nature_cnn', 'adam', scheme='sync')
  config.env.task = 'Pong-v5'
  config.env.num_envs = 64
  config.env.episodic_life = True
  config.env.reward_clip = True
  config.total_steps = 7_000_000
  config.unroll_length = 128
  config.num_minibatches = 4
  config.num_epochs = 4
  config.microbatch_rows = -1
  config.num_shards = 2
  config.num_grad_shards = 2
  config.loss.clip = 0.1
  config.loss.value_coef = 2.24
  config.loss.entropy_coef = 0.0
  config.optimizer.learning_rate = 2e-3  # the table does not say that it falls
  config.optimizer.anneal = False
  config.optimizer.max_grad_norm = 1.13
  config.env.renew_every_updates = 200
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 192
    config.env.num_envs = 8
    config.unroll_length = 8
    config.network.hidden = 64
    config.microbatch_rows = 4
  return config
