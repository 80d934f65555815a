"""TD3 on MuJoCo, one gradient step for each step.

podracer_jit --config=configs/td3_mujoco.py --config.env.task=Hopper-v4 --workdir=runs/td3_hopper

The settings are those of the authors' later program and of CleanRL's td3_continuous_action; the
paper's are in losses/td3.py. Hidden layers begin with weights like theirs: with orthogonal ones a
run on Ant learned to stand still. Eight environments act at once, and 32 gradient steps follow each
32 steps.
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = experiment.config('td3', 'mlp', 'adam', scheme='apex_lockstep')
  config.total_steps = 1_000_000
  config.unroll_length = 4
  config.env.task = 'HalfCheetah-v4'
  config.env.num_envs = 8
  config.network.hidden = (256, 256)
  config.network.activation = 'relu'
  config.network.weight_init = 'fan_in'
  config.optimizer.learning_rate = 3e-4
  config.optimizer.anneal = False
  config.optimizer.eps = 1e-8
  config.optimizer.max_grad_norm = 1e6  # none
  config.replay.capacity = 1_000_000
  config.replay.min_size = 25_000  # until then, actions are uniform
  config.replay.batch_size = 256
  config.replay.gradient_steps = 32
  config.replay.priority_exponent = 0.0
  config.env.renew_every_updates = 0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 640
    config.replay.capacity = 600
    config.replay.min_size = 200
    config.replay.batch_size = 32
    config.replay.gradient_steps = 4
  return config
