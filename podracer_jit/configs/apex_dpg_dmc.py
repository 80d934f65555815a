"""Ape-X DPG on the DeepMind Control Suite, from features (1803.00933, appendix D).

podracer_jit --config=configs/apex_dpg_dmc.py --workdir=runs/x --config.env.task=HumanoidWalk-v1
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('dpg', 'deterministic', 'adam', scheme='apex')
  config.total_steps = 1_000_000_000
  config.unroll_length = 50  # rows that an actor sends at once

  config.env.task = 'HumanoidStand-v1'
  config.env.num_envs = 64

  config.network.actor_hidden = (300, 200)
  config.network.critic_hidden = (400, 300)
  config.loss.n_step = 5
  config.loss.target_every = 100
  config.loss.noise = 0.3
  config.loss.dqda_clip = 1.0
  config.optimizer.learning_rate = 1e-4
  config.optimizer.anneal = False
  config.optimizer.eps = 1e-8
  config.optimizer.max_grad_norm = 40.0

  config.replay.capacity = 1_000_000
  config.replay.min_size = 50_000
  config.replay.batch_size = 256
  config.replay.gradient_steps = 16  # between two additions to the replay
  config.replay.eviction = 'prioritised'
  config.replay.params_every = 2  # rollouts, 100 steps of an environment
  config.env.renew_every_updates = 10_000

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 800
    config.env.num_envs = 8
    config.unroll_length = 10
    config.replay.capacity = 400
    config.replay.min_size = 160
    config.replay.batch_size = 32
  return config
