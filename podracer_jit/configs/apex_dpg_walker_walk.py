"""Ape-X DPG on the Control Suite's walker, on a CPU core or two.

podracer_jit --config=configs/apex_dpg_walker_walk.py --workdir=runs/walker

The networks and the replay are smaller than the paper's, the learning rate is ten times as large,
and there are two gradient steps for every 16 steps of the task.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('dpg', 'deterministic', 'adam', scheme='apex_lockstep')
  config.total_steps = 1_000_000
  config.unroll_length = 16

  config.env.task = 'WalkerWalk-v1'
  config.env.num_envs = 16

  config.network.actor_hidden = (256, 128)
  config.network.critic_hidden = (256, 256)
  config.loss.n_step = 5
  config.loss.target_every = 100
  config.loss.noise = 0.3
  config.optimizer.learning_rate = 1e-3
  config.optimizer.anneal = False
  config.optimizer.eps = 1e-8
  config.optimizer.max_grad_norm = 40.0

  config.replay.capacity = 200_000
  config.replay.min_size = 5_000
  config.replay.batch_size = 256
  config.replay.gradient_steps = 32
  config.replay.eviction = 'prioritised'
  config.env.renew_every_updates = 1000

  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 2_000
    config.replay.capacity = 1_000
    config.replay.min_size = 500
    config.replay.batch_size = 32
  return config
