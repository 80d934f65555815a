"""IMPALA on Atari: Cleanba's setting (2310.00036, table 3) on the Machado et al. protocol.

podracer_jit --config=configs/impala_atari.py --workdir=runs/breakout \
    --config.env.task=Breakout-v5
The Nature CNN instead of the IMPALA ResNet: --config=configs/impala_atari.py:nature_cnn
On GPUs, actors and learner apart: --config.placement.learner_devices='(1,2,3,4)'
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; the arguments are `smoke` (a few small updates) and `nature_cnn`."""
  args = experiment.arguments(arg, 'smoke', 'nature_cnn')
  network = 'nature_cnn' if 'nature_cnn' in args else 'impala_resnet'  # (16, 32, 32), hidden 256
  config = experiment.config('impala', network, 'rmsprop', scheme='cleanba')
  if network == 'nature_cnn':
    # Otherwise most of its first channels soon give 0 for every image of Pong, which is bright.
    config.network.centre = True
  config.total_steps = 50_000_000  # 200M frames
  config.unroll_length = 20
  config.num_minibatches = 4

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
  config.loss.vtrace_lambda = 1.0
  config.loss.clip_rho = 1.0
  config.loss.clip_pg_rho = 1.0
  config.loss.baseline_coef = 0.5
  config.loss.entropy_coef = 0.01

  config.optimizer.learning_rate = 6e-4  # linearly to 0
  config.optimizer.decay = 0.99
  config.optimizer.eps = 0.01
  config.optimizer.max_grad_norm = 40.0

  config.num_grad_shards = 4  # at most 4 learner devices
  config.env.renew_every_updates = 2_000  # 5M steps

  if 'smoke' in args:
    config.total_steps = 72
    config.env.num_envs = 8
    config.unroll_length = 3
    config.num_grad_shards = 2
  return config
