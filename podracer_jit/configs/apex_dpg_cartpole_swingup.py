"""Ape-X DPG on the Control Suite's cart-pole, swung up from hanging, on a CPU core or two.

podracer_jit --config=configs/apex_dpg_cartpole_swingup.py --workdir=runs/swingup
"""

from podracer_jit import experiment
from podracer_jit.configs import apex_dpg_walker_walk


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few small updates only."""
  config = apex_dpg_walker_walk.get_config(arg)
  config.env.task = 'CartpoleSwingup-v1'
  if 'smoke' not in experiment.arguments(arg, 'smoke'):
    config.total_steps = 500_000
  return config
