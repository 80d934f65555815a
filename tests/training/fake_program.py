"""A program that makes updates of numbers, without environments or learning, in no time."""

import math

import jax
import numpy as np

from podracer_jit.experiment import build
from podracer_jit.experiment.build import Snapshot
from podracer_jit.schemes.reports import Report
from podracer_jit.training.program import Moment
from podracer_jit.types import Episodes

STEPS = 8  # of an update


class FakeProgram:
  """In place of `GraphProgram`: update n adds n to all parameters, and its loss is 1 / n.

  Its environments would be sent the actions of `sent_in`; a run that goes on within a segment must
  have all that were sent in it.
  """

  def __init__(self, run, snapshot, adapting=None):
    del adapting
    self._run = run
    self._snapshot = snapshot.whole()

  def header(self):
    return {}

  def segment_index(self, number):
    return self._snapshot.segment

  def segment(self, report, watcher):
    run = self._run
    state = self._snapshot.state
    index = self._snapshot.segment
    first = self._snapshot.begun
    update = int(state.update)
    end = build.segment_end(run.experiment, first)
    self._check_sent(first, update)
    watcher.begin()
    is_over = False
    while update < end and not is_over:
      update += 1
      state = state._replace(
          params=jax.tree.map(lambda x, n=update: x + np.asarray(n, x.dtype), state.params),
          update=np.int32(update), steps=np.int32(state.steps + STEPS))
      state = jax.device_put(state, run.place.learners[0])
      report([(0, report_of(update))])
      position = Snapshot(state, None, index, first)
      if update == end:
        position = Snapshot(state, None, index + 1)
      is_over = watcher.after(Moment([update], [int(state.steps)], [sent_in(run, update)],
                                     lambda: None, lambda number, position=position: position))
      is_over = is_over or state.steps >= run.experiment.total_steps
      self._snapshot = position

  def _check_sent(self, first, update):
    if first == update:
      assert self._snapshot.sent is None
    else:
      expected = [sent_in(self._run, number) for number in range(first + 1, update + 1)]
      np.testing.assert_array_equal(self._snapshot.sent, expected)

  def close(self):
    pass


def sent_in(run, update):
  """Returns [T, B, ...] for each vector environment: what they were sent in an update."""
  like = build.shapes_of_pool(run.experiment, run.acting).envs[0].sent
  count = run.experiment.num_shards * math.prod(like.shape)
  values = (np.arange(count) + update) % 251
  return list(values.astype(like.dtype).reshape(run.experiment.num_shards, *like.shape))


def report_of(update):
  """Returns the report of an update, in which one episode has ended."""
  ended = np.ones((1, 1, 1), bool)
  episodes = Episodes(ended, np.full(ended.shape, update, np.float32), np.full(ended.shape, 3))
  fingerprint = np.array([[update, 2 * update]], np.uint32)
  return Report(dict(update=np.array([update]), steps=np.array([update * STEPS]),
                     valid=np.array([STEPS]), batch=fingerprint, params=fingerprint + 1,
                     episodes=episodes, loss=np.array([1 / update], np.float32)),
                1, (0.0,), (0.0,))
