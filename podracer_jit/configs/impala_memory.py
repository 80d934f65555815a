"""IMPALA with a GRU on a task that needs memory: MiniGrid's RedBlueDoors, 6 x 6.

podracer_jit --config=configs/impala_memory.py --workdir=runs/memory

The agent must open the red door, then the blue door across the room; the other order ends the
episode without a reward. An agent that faces the blue door cannot see whether the red door is open.
Without memory: --config.network.core=none
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('impala', 'mlp', 'adam', scheme='fused')
  config.env.task = 'MiniGrid-RedBlueDoors-6x6-v0'
  config.env.num_envs = 64
  config.total_steps = 4_000_000
  config.unroll_length = 32
  config.network.hidden = (128,)
  config.network.core = 'gru'
  config.network.core_size = 128
  config.normalise.obs = True
  config.loss.entropy_coef = 0.01
  config.optimizer.learning_rate = 1e-3
  config.optimizer.max_grad_norm = 40.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 10_000
  return config
