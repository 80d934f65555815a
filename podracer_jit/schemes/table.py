"""The table of schemes: the graph of each, and the lag and order of values in it.

R is the rollout, G the gradient and U the update; see ARCHITECTURE.md.
"""

from __future__ import annotations

from podracer_jit.schemes import central, free, fused, split
from podracer_jit.schemes.scheme import Scheme

SCHEMES = {
    # R waits for U, U for R: on-policy (CleanRL's PPO; Cleanba's sync mode).
    'sync': Scheme(split.IN_ORDER),
    # R uses the parameters of one update ago while G and U compute the next (Cleanba).
    'cleanba': Scheme(split.IN_ORDER, lag=1),
    # The arithmetic of `sync` in one program, without Python between updates (Anakin).
    'fused': Scheme(fused.GRAPH, alone=True),
    # The schemes of NAPPO (2007.02622, figure 1) begin here. A single worker on one device.
    'ppo': Scheme(split.IN_ORDER, alone=True),
    # Every worker runs R and G and, after an all-reduce, U.
    'ddppo': Scheme(split.IN_ORDER, colocated=True),
    # Workers run R and G, one device runs U on the sum of their gradients.
    'dppo': Scheme(split.APART, colocated=True),
    # Like `dppo`, but U takes one gradient at a time, as they arrive (A3C).
    'dppo_async': Scheme(central.GRAPH, colocated=True),
    # Like `dppo`, but R runs in workers of its own, one update ahead of G.
    'rapid': Scheme(split.APART, lag=1),
    # Like `rapid`, but R takes the latest parameters, and U one gradient at a time.
    'rapid_async': Scheme(central.GRAPH, lag=None),
    # Actors use the latest parameters; the learner takes rollouts as they arrive (IMPALA).
    'impala': Scheme(split.AS_THEY_COME, lag=None),
    # Actors use the latest parameters and fill a replay; G draws from it at its own rate (Ape-X,
    # 1803.00933).
    'apex': Scheme(free.GRAPH, lag=None),
    # `cleanba` with a replay: a fixed number of gradient steps for each round of rollouts.
    'apex_lockstep': Scheme(split.IN_ORDER._replace(replay=True), lag=1),
}
