"""PPO on Atari: Cleanba's setting (2310.00036, table 2) on the Machado et al. protocol.

podracer_jit --config=configs/ppo_atari.py --workdir=runs/breakout_ppo \
    --config.env.task=Breakout-v5
The Nature CNN instead of the IMPALA ResNet: --config=configs/ppo_atari.py:nature_cnn
Acting and learning at once, with a lag of one update: --config.scheme=cleanba

IMPALA's setting (appendix E: table 3, but for the loss): --config=configs/ppo_atari.py:appendix_e
Large batches (appendix F: 15,360 steps, twice as many with twice the devices), here for 16 learner
devices:
    --config=configs/ppo_atari.py:appendix_f --config.env.num_envs=1920 \
    --config.num_grad_shards=16 --config.num_shards=16

As in the paper's figures, actors and learner take turns. With several learner devices the paper
normalises advantages on each device; here they are normalised over the whole minibatch.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config.

  Args:
    arg: `smoke` (a few small updates), `nature_cnn`, `appendix_e` and `appendix_f`, by comma.
  """
  args = experiment.arguments(arg, 'smoke', 'nature_cnn', 'appendix_e', 'appendix_f')
  network = 'nature_cnn' if 'nature_cnn' in args else 'impala_resnet'  # (16, 32, 32), hidden 256
  optimizer, scheme = ('rmsprop', 'cleanba') if 'appendix_e' in args else ('adam', 'sync')
  config = experiment.config('ppo', network, optimizer, scheme=scheme)
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

  if 'appendix_e' in args:
    config.unroll_length = 20
    config.num_epochs = 1
    config.optimizer.learning_rate = 6e-4
    config.optimizer.decay = 0.99
    config.optimizer.eps = 0.01
    config.optimizer.max_grad_norm = 40.0
  if 'appendix_f' in args:
    config.total_steps = 100_000_000
    config.optimizer.anneal = False

  config.num_grad_shards = 8  # at most 8 learner devices
  config.microbatch_rows = -1
  config.env.renew_every_updates = 300  # 5M steps

  if 'smoke' in args:
    config.total_steps = 192
    config.env.num_envs = 8
    config.unroll_length = 8
    config.network.hidden = 64
    config.num_grad_shards = 2
    config.microbatch_rows = 4
  return config
