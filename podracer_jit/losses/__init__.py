"""Algorithms, one in each file, with losses that are pure functions of arrays."""

from podracer_jit.late import loaded_late

# It loads TensorFlow Probability, which takes half a second; losses that are traced use it.
with loaded_late(lambda spec: spec.name == 'rlax'):
  import rlax as rlax

from podracer_jit.losses.dpg import DPG as DPG
from podracer_jit.losses.dpg import critic_td_error as critic_td_error
from podracer_jit.losses.dpg import policy_loss as policy_loss
from podracer_jit.losses.dqn import DQN as DQN
from podracer_jit.losses.dqn import dqn_td_error as dqn_td_error
from podracer_jit.losses.impala import IMPALA as IMPALA
from podracer_jit.losses.impala import impala_loss as impala_loss
from podracer_jit.losses.ppo import PPO as PPO
from podracer_jit.losses.ppo import gae as gae
from podracer_jit.losses.ppo import ppo_loss as ppo_loss
from podracer_jit.losses.ppo import vtrace as vtrace
from podracer_jit.losses.pqn import PQN as PQN
from podracer_jit.losses.pqn import lambda_returns as lambda_returns
from podracer_jit.losses.r2d2 import R2D2 as R2D2
from podracer_jit.losses.sac import SAC as SAC
from podracer_jit.losses.td3 import TD3 as TD3

ALGORITHMS = {'impala': IMPALA, 'ppo': PPO, 'pqn': PQN, 'dqn': DQN, 'dpg': DPG, 'sac': SAC,
              'td3': TD3, 'r2d2': R2D2}
