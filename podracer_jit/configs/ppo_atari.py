"""PPO on Atari: Cleanba's setting (2310.00036, table 2) on the Machado et al. protocol.

podracer_jit --config=configs/ppo_atari.py --workdir=runs/breakout_ppo \
    --config.env.task=Breakout-v5
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('ppo', 'nature_cnn', 'adam', scheme='cleanba')
  config.total_steps = 50_000_000  # 200M frames
  config.unroll_length = 128
  config.num_minibatches = 4
  config.num_epochs = 4

  config.env.task = 'Breakout-v5'
  config.env.num_envs = 128
  config.num_shards = 2  # EnvPool steps one shard while the policy works on the other
  # Machado et al. (1709.06009): sticky actions, every action, no hints about lives, 30 minutes;
  # FIRE is pressed at a reset, as in Cleanba (EnvPool's default).
  config.env.repeat_action_probability = 0.25
  config.env.full_action_space = True
  config.env.noop_max = 1
  config.env.episodic_life = False
  config.env.frame_skip = 4
  config.env.max_episode_steps = 27_000  # 108,000 frames
  config.env.reward_clip = True  # for the loss; episode returns are not clipped

  config.loss.discount = 0.99
  config.loss.gae_lambda = 0.95
  config.loss.clip = 0.1
  config.loss.clip_value = False
  config.loss.value_coef = 0.5
  config.loss.entropy_coef = 0.01
  config.loss.normalise_advantage = True

  config.optimizer.learning_rate = 2.5e-4  # linearly to 0
  config.optimizer.eps = 1e-5
  config.optimizer.max_grad_norm = 0.5

  config.num_grad_shards = 8  # at most 8 learner devices
  config.microbatch_rows = -1
  config.env.renew_every_updates = 300  # 5M steps

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 192
    config.env.num_envs = 8
    config.unroll_length = 8
    config.network.hidden = 64
    config.num_grad_shards = 2
    config.microbatch_rows = 4
  return config
