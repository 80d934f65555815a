"""Losses: pure functions of one sequence or one row; the caller maps them over the batch."""

from podracer_jit.losses.impala import impala_loss as impala_loss
from podracer_jit.losses.ppo import gae as gae
from podracer_jit.losses.ppo import ppo_loss as ppo_loss
from podracer_jit.losses.ppo import vtrace as vtrace
