"""Rollouts keep each frame once."""

import pytest
from numpy.testing import assert_array_equal

from podracer_jit.envs import frames
from podracer_jit.experiment import build
from tests.runs import fresh, initial_state, small

pytestmark = pytest.mark.implementation


def test_frames_of_an_asynchronous_pool_are_kept_once(monkeypatch):
  deduplicate = frames.from_stacks
  # Rollouts then have both: the whole stacks, and the frames kept once.
  monkeypatch.setattr(frames, 'from_stacks', lambda obs, stack: (obs, deduplicate(obs, stack)))
  prepared_run = fresh(small('impala', 'Pong-v5', 'nature_cnn', env_batch=4))
  num_reset_stacks = 0
  snapshot = build.Snapshot(initial_state(prepared_run))
  with build.segment(prepared_run, snapshot, 3, print) as segment:
    worker = segment.workers[0]
    actor_state = worker.state
    params = worker.reads[0].channel.get()
    for _ in range(3):
      actor_state, (rollouts,) = worker.fire(actor_state, params)
      stacks, single_frames = rollouts.value[0].obs
      assert single_frames.frame.shape == (8 + 4, 8, 1, 21, 21)
      assert_array_equal(frames.stacks(single_frames), stacks)
      num_reset_stacks += single_frames.is_reset_stack.sum()
  assert num_reset_stacks
