"""The table of schemes: which graph each has, and how old what flows in it may be."""

from __future__ import annotations

from podracer_jit.schemes import central, free, fused, split
from podracer_jit.schemes.scheme import Scheme

SCHEMES = {
    # R waits for U, U for R: on-policy (CleanRL's PPO; Cleanba's sync mode).
    'sync': Scheme(split.IN_ORDER),
    # R works with the parameters of one update ago while G and U make the next (Cleanba).
    'cleanba': Scheme(split.IN_ORDER, lag=1),
    # The arithmetic of `sync`, with no Python and no hand-off between updates (Anakin's shape).
    'fused': Scheme(fused.GRAPH, alone=True),
    # NAPPO (2007.02622), figure 1. A single worker:
    'ppo': Scheme(split.IN_ORDER, alone=True),
    # No centre: every worker makes rollouts and gradients and, after an all-reduce, the update.
    'ddppo': Scheme(split.IN_ORDER, colocated=True),
    # Workers make rollouts and gradients, the centre makes the update of all of them ...
    'dppo': Scheme(central.GRAPH, colocated=True, replay=False),
    # ... or of one at a time, as they come (A3C).
    'dppo_async': Scheme(central.GRAPH, colocated=True, each=True, replay=False),
    # Workers of their own make rollouts, one update ahead, for those that make gradients ...
    'rapid': Scheme(central.GRAPH, lag=1, replay=False),
    # ... or with no order between any of them.
    'rapid_async': Scheme(central.GRAPH, lag=None, each=True, replay=False),
    # Many make rollouts with the latest parameters; one place takes them as they come (IMPALA).
    'impala': Scheme(split.AS_THEY_COME, lag=None, replay=False),
    # Many make rollouts with the latest parameters, for a replay that G draws from at its own rate
    # (Ape-X, 1803.00933) ...
    'apex': Scheme(free.GRAPH, lag=None, replay=True),
    # ... or, one update ahead, for so many gradient steps a round: `cleanba` with a replay.
    'apex_lockstep': Scheme(split.IN_ORDER, lag=1, replay=True),
}
