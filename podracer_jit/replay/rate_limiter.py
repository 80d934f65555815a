"""How far acting and learning from a replay may run ahead of each other."""

from __future__ import annotations


class Rate:
  """Holds transitions drawn and added to a ratio, within a tolerance (as Reverb's rate limiter).

  Counted from after the first draw: `drawn` stays within `tolerance` of `samples_per_insert *
  added`. Neither side waits for ever where the tolerance is at least half of a batch and of what a
  rollout allows together. Used by one thread.
  """

  def __init__(self, samples_per_insert: float, tolerance: float, batch: int, most_added: int,
               capacity: int):
    """Nothing was added yet.

    Args:
      samples_per_insert: the ratio; 0 for none: neither side ever waits.
      tolerance: in transitions drawn.
      batch: transitions that one firing of the learner draws.
      most_added: transitions that one rollout adds at most.
      capacity: rollouts that may wait to be added.
    """
    self._ratio, self._tolerance = samples_per_insert, tolerance
    self._batch, self._most_added, self._capacity = batch, most_added, capacity
    self._ahead = 0.0  # of what was added, in transitions drawn
    self._ready = False

  def wants(self) -> tuple[int, int]:
    """How many rollouts the learner must have now, and how many it takes at most."""
    if not self._ready:
      return 1, self._capacity
    if not self._ratio:
      return 0, self._capacity
    room = int((self._ahead + self._tolerance) // (self._ratio * self._most_added))
    return 0 if self.may_draw() else 1, min(max(room, 0), self._capacity)

  def may_draw(self) -> bool:
    """Whether the learner may draw a batch; of whether there is enough it knows nothing."""
    held = self._ratio and self._ready
    return not held or self._ahead + self._batch <= self._tolerance

  def count(self, added: int, drawn: int) -> None:
    """Transitions added, and then drawn: none as long as there is not enough."""
    if self._ready:
      self._ahead += drawn - self._ratio * added
    self._ready = self._ready or drawn > 0
