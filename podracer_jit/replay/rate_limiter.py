"""Rate limiter between acting and learning from a replay."""

from __future__ import annotations


class RateLimiter:
  """Limiter of the ratio of drawn items to added rows, within a tolerance (as in Reverb).

  A transition begins in each row, so for transitions it is the ratio of drawn to added ones.
  Counting begins after the first draw: `drawn` stays within `tolerance` of `ratio * added`. Neither
  side waits for ever if the tolerance is at least half the sum of a batch and the draws that one
  rollout allows. Only one thread may use it.
  """

  def __init__(self, ratio: float, tolerance: float, batch: int, most_added: int, capacity: int):
    """Creates a limiter before any row is added.

    Args:
      ratio: items drawn for each row added; with 0 neither side ever waits.
      tolerance: allowed deviation, in items drawn.
      batch: items that one firing of the learner draws.
      most_added: the largest number of rows that one rollout adds.
      capacity: rollouts that may wait to be added.
    """
    self._ratio = ratio
    self._tolerance = tolerance
    self._batch = batch
    self._most_added = most_added
    self._capacity = capacity
    # drawn - ratio * added: how far learning is ahead of acting, in items drawn.
    self._ahead = 0.0
    self._ready = False

  @property
  def capacity(self) -> int:
    """Rollouts that may wait to be added; while so many wait, actors wait, too."""
    return self._capacity

  def wants(self) -> tuple[int, int]:
    """Returns the least and the largest number of rollouts that the learner takes now.

    The learner waits for the least number.
    """
    # Before the first draw the learner can only wait for rollouts.
    if not self._ready:
      return 1, self._capacity
    if not self._ratio:
      return 0, self._capacity
    room = int((self._ahead + self._tolerance) // (self._ratio * self._most_added))
    return 0 if self.may_draw() else 1, min(max(room, 0), self._capacity)

  def may_draw(self) -> bool:
    """Returns True if the ratio allows a batch; it ignores the replay's minimal size."""
    limited = self._ratio and self._ready
    return not limited or self._ahead + self._batch <= self._tolerance

  def count(self, added: int, drawn: int) -> None:
    """Counts rows added and items drawn; drawn is 0 until the replay has its minimal size."""
    if self._ready:
      self._ahead += drawn - self._ratio * added
    self._ready = self._ready or drawn > 0
