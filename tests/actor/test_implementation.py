"""How rollouts keep frames, seen by a patched function."""

import pytest
from numpy.testing import assert_array_equal

from podracer_jit.envs import frames
from podracer_jit.run import build
from tests.runs import fresh, initial_state, small

pytestmark = pytest.mark.implementation


def test_frames_of_an_asynchronous_pool_are_kept_once(monkeypatch):
  of = frames.from_stacks
  monkeypatch.setattr(frames, 'of', lambda obs, stack: (obs, of(obs, stack)))
  whole_run = fresh(small('impala', 'Pong-v5', 'nature_cnn', env_batch=4))
  state, filled_anew = initial_state(whole_run), 0
  with build.segment(whole_run, state, 0, 3, print) as segment:
    worker = segment.workers[0]
    acting, params = worker.state, worker.reads[0].channel.get()
    for _ in range(3):
      acting, (rollouts,) = worker.fire(acting, params)
      whole, once = rollouts.value[0].obs
      assert once.frame.shape == (8 + 4, 8, 1, 42, 42)
      assert_array_equal(frames.stacks(once), whole)
      filled_anew += once.is_reset_stack.sum()
  assert filled_anew
