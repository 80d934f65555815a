"""The table of schemes: where the three operations run, and what joins them."""

from __future__ import annotations

from typing import NamedTuple


class Scheme(NamedTuple):
  """R, G and U of a scheme. G and U are fused into one learner program in all of these."""

  fused: bool  # R with them: one program, many updates a call
  lag: int  # how many updates behind a rollout's parameters are, after a segment's first


SCHEMES = {
    # R waits for U, U for R: on-policy (CleanRL's PPO; Cleanba's sync mode).
    'sync': Scheme(fused=False, lag=0),
    # R works with the parameters of one update ago while G and U make the next (Cleanba).
    'cleanba': Scheme(fused=False, lag=1),
    # The arithmetic of `sync`, with no Python and no hand-off between updates (Anakin's shape).
    'fused': Scheme(fused=True, lag=0),
}
