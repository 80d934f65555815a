"""A program that makes updates of numbers, without environments or learning, in no time."""

import jax
import numpy as np

from podracer_jit.experiment.build import Snapshot
from podracer_jit.schemes.reports import Report
from podracer_jit.types import Episodes

STEPS = 8  # of an update


class FakeProgram:
  """In place of `GraphProgram`: update n adds n to all parameters, and its loss is 1 / n."""

  def __init__(self, run, snapshot):
    self._run = run
    self._snapshot = snapshot

  def header(self):
    return {}

  def segment(self, updates, report, asked_to_stop):
    state, _, segment = self._snapshot
    total = self._run.experiment.total_steps
    for _ in range(updates):
      update = int(state.update) + 1
      state = state._replace(
          params=jax.tree.map(lambda x, n=update: x + np.asarray(n, x.dtype), state.params),
          update=np.int32(update), steps=np.int32(state.steps + STEPS))
      report([(0, report_of(update))])
      if state.steps >= total or asked_to_stop():
        break
    state = jax.device_put(state, self._run.place.learners[0])
    self._snapshot = Snapshot(state, None, segment + 1)

  def snapshot(self, number):
    return self._snapshot

  def close(self):
    pass


def report_of(update):
  """Returns the report of an update, in which one episode has ended."""
  ended = np.ones((1, 1, 1), bool)
  episodes = Episodes(ended, np.full(ended.shape, update, np.float32), np.full(ended.shape, 3))
  fingerprint = np.array([[update, 2 * update]], np.uint32)
  return Report(dict(update=np.array([update]), steps=np.array([update * STEPS]),
                     valid=np.array([STEPS]), batch=fingerprint, params=fingerprint + 1,
                     episodes=episodes, loss=np.array([1 / update], np.float32)),
                1, (0.0,), (0.0,))
