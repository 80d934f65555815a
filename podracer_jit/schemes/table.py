"""The table of schemes: where the three operations run, and what joins them."""

from __future__ import annotations

from typing import NamedTuple


class Scheme(NamedTuple):
  """Where R, G and U of a scheme run, and who waits for whom."""

  # How many updates behind a rollout's parameters are, after a segment's first; None: R takes the
  # latest there are and waits for nobody.
  lag: int | None = 0
  fused: bool = False  # R, G and U are one program, with many updates a call
  alone: bool = False  # they are on one device
  colocated: bool = False  # rollouts are made where gradients are
  arrival: bool = False  # G takes rollouts as they come, whoever made them
  central: bool = False  # U is apart from G: one place that has the optimizer, and adds
  each: bool = False  # U applies the gradient of each worker as it comes; else the sum of all
  replay: bool | None = None  # True: G draws from a replay; False: from rollouts; None: as the loss

  @property
  def repeats(self) -> bool:
    """Whether the same experiment gives the same bits: all hand-offs block."""
    return self.lag is not None and not self.each

  @property
  def free(self) -> bool:
    """Whether acting and learning from a replay go on at rates of their own."""
    return self.arrival and bool(self.replay)


SCHEMES = {
    # R waits for U, U for R: on-policy (CleanRL's PPO; Cleanba's sync mode).
    'sync': Scheme(),
    # R works with the parameters of one update ago while G and U make the next (Cleanba).
    'cleanba': Scheme(lag=1),
    # The arithmetic of `sync`, with no Python and no hand-off between updates (Anakin's shape).
    'fused': Scheme(fused=True, alone=True),
    # NAPPO (2007.02622), figure 1. A single worker:
    'ppo': Scheme(alone=True),
    # No centre: every worker makes rollouts and gradients and, after an all-reduce, the update.
    'ddppo': Scheme(colocated=True),
    # Workers make rollouts and gradients, the centre makes the update of all of them ...
    'dppo': Scheme(colocated=True, central=True, replay=False),
    # ... or of one at a time, as they come (A3C).
    'dppo_async': Scheme(colocated=True, central=True, each=True, replay=False),
    # Workers of their own make rollouts, one update ahead, for those that make gradients ...
    'rapid': Scheme(lag=1, central=True, replay=False),
    # ... or with no order between any of them.
    'rapid_async': Scheme(lag=None, central=True, each=True, replay=False),
    # Many make rollouts with the latest parameters; one place takes them as they come (IMPALA).
    'impala': Scheme(lag=None, arrival=True, replay=False),
    # Many make rollouts with the latest parameters, for a replay that G draws from at its own rate
    # (Ape-X, 1803.00933) ...
    'apex': Scheme(lag=None, arrival=True, replay=True),
    # ... or, one update ahead, for so many gradient steps a round: `cleanba` with a replay.
    'apex_lockstep': Scheme(lag=1, replay=True),
}
