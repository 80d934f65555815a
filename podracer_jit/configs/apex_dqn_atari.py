"""Ape-X DQN on Atari (1803.00933, section 4.1 and appendix C).

podracer_jit --config=configs/apex_dqn_atari.py --workdir=runs/x --config.env.task=Breakout-v5

All actors together have the paper's 360 environments. A replay of 2M transitions, with those that
come between two evictions, takes 15.1 GB of the learner's memory; `--config.replay.capacity` makes
it smaller. Up to 8 learner devices share it and the gradients with `--config.num_grad_shards=8`.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with `smoke` a run has a few small updates only, and a small replay."""
  config = experiment.config('dqn', 'nature_cnn', 'centred_rmsprop', scheme='apex')
  config.total_steps = 2_000_000_000  # 8 of the paper's 22.8 billion frames
  config.unroll_length = 50  # rows that an actor sends at once

  config.env.task = 'Pong-v5'
  config.env.num_envs = 360
  config.env.noop_max = 30
  config.env.repeat_action_probability = 0.0
  config.env.episodic_life = True
  config.env.reward_clip = True
  config.env.max_episode_steps = 50_000 // 4

  config.loss.n_step = 3
  config.loss.target_every = 2500
  config.loss.epsilon = 0.4
  config.loss.epsilon_alpha = 7.0
  config.optimizer.learning_rate = 0.00025 / 4

  config.replay.capacity = 2_000_000
  config.replay.min_size = 50_000
  config.replay.batch_size = 512
  config.replay.gradient_steps = 16  # between two additions to the replay
  config.replay.evict_every = 100
  config.replay.params_every = 2  # rollouts: 400 frames of an environment
  config.env.renew_every_updates = 5_000

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 320
    config.env.num_envs = 4
    config.unroll_length = 10
    config.network.hidden = 64
    config.loss.target_every = 25
    config.replay.capacity = 200
    config.replay.min_size = 80
    config.replay.batch_size = 8
  return config
