"""PPO with 64 environments: rl_games' settings (2206.10558, tables 6 to 8).

podracer_jit --config=configs/rl_games.py:Ant --workdir=runs/ant

The argument is a task of the tables: Ant, HalfCheetah, Humanoid, Walker2d, Breakout or Pong. As in
rl_games, the rate of all but Breakout follows the policy's change. It is measured from the policy
that made the rollout. So is rl_games' for discrete actions, by half the squared difference of log
probabilities; for continuous ones it measures from the policy at the minibatch's previous visit, so
it takes larger steps. As there, each pixel of Pong's stacks has a mean and a deviation of its own.
Observations are clipped to 10 deviations; in rl_games to 5. The tables do not say how long MuJoCo
and Breakout were trained, nor which options Atari had; here they have 10 million steps, and
CleanRL's options.
"""

from podracer_jit import experiment

# Steps of a rollout, epochs, and sizes of the network.
MUJOCO = {'HalfCheetah': (256, 5, (128, 64, 32)), 'Ant': (64, 4, (256, 128, 64)),
          'Walker2d': (128, 5, (256, 128, 64)), 'Humanoid': (128, 5, (512, 256, 128))}


def get_config(arg: str = ''):
  """Returns the config.

  Args:
    arg: a task of the tables, and `smoke` for a run of a few small updates, by comma.
  """
  args = experiment.arguments(arg, 'smoke', 'Breakout', 'Pong', *MUJOCO)
  tasks = sorted(set(args) - {'smoke'}) or ['Ant']
  if len(tasks) > 1:
    raise ValueError(f'rl_games: takes one task, got {" and ".join(tasks)}')
  (task,) = tasks
  is_atari = task not in MUJOCO
  config = experiment.config('ppo', 'nature_cnn' if is_atari else 'mlp', 'adam', scheme='sync')
  config.env.num_envs = 64
  config.total_steps = 8_000_000 if task == 'Pong' else 10_000_000
  config.normalise.value = True
  config.loss.clip = 0.2
  config.loss.clip_value = task != 'Breakout'
  config.loss.value_coef = 2.0
  config.optimizer.anneal = False
  config.optimizer.learning_rate = 8e-4 if task == 'Breakout' else 3e-4
  config.optimizer.max_grad_norm = 1.0
  if is_atari:
    config.env.task = f'{task}-v5'
    config.env.episodic_life = True
    config.env.reward_clip = True
    config.unroll_length = 128
    config.num_minibatches = 8 if task == 'Pong' else 4
    config.num_epochs = 2
    config.loss.discount = 0.999
    config.loss.entropy_coef = 0.01
    config.normalise.obs = task == 'Pong'
    config.network.activation = 'elu' if task == 'Pong' else 'relu'
    config.optimizer.kl_target = 0.01 if task == 'Pong' else 0.0
    config.env.renew_every_updates = 200
  else:
    config.env.task = f'{task}-v4'
    config.unroll_length, config.num_epochs, config.network.hidden = MUJOCO[task]
    config.num_minibatches = 2
    config.normalise.obs = True
    config.loss.clip_smoothly = True
    config.loss.entropy_coef = 0.0
    config.loss.reward_scale = 0.1
    config.network.activation = 'elu'
    config.network.weight_init = 'xavier'
    config.optimizer.kl_target = 0.008
  config.num_shards = 2
  config.num_grad_shards = 2
  config.microbatch_rows = -1
  if 'smoke' in args:
    config.unroll_length = 8
    config.env.num_envs = 16
    config.total_steps = 300
  return config
