"""Losses: pure functions of one sequence, row or transition, which callers map over a batch."""

from podracer_jit.losses.dpg import critic_td_error as critic_td_error
from podracer_jit.losses.dpg import policy_loss as policy_loss
from podracer_jit.losses.dqn import dqn_td_error as dqn_td_error
from podracer_jit.losses.impala import impala_loss as impala_loss
from podracer_jit.losses.ppo import gae as gae
from podracer_jit.losses.ppo import ppo_loss as ppo_loss
from podracer_jit.losses.ppo import vtrace as vtrace
