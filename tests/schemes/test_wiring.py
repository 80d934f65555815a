"""Parts of graphs: reports that the learner waits for, states of actors, and positions."""

import threading

import jax
import numpy as np
import pytest

from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.loops import Endpoint, Worker
from podracer_jit.runtime.channels import Closed, Versioned
from podracer_jit.schemes.reports import ReportQueue
from podracer_jit.schemes.wiring import ActorStates
from tests.runs import changed, initial_state, prepared, small
from tests.schemes.test_function_envs import experiment as of_functions
from tests.test_loops import must_end

# Reports.


def test_the_learner_waits_until_its_reports_are_written():
  reports = ReportQueue()
  may_write = threading.Event()
  written = []

  def write(report):
    assert may_write.wait(60)
    written.append(report)

  def fire(k):
    return k + 1, [Versioned(k, k)]

  def until(k):
    if k == 2:  # one report is being written, and one is in the queue
      threading.Timer(0.2, may_write.set).start()
      reports.wait_written()
      assert written == [0, 1]
    return k == 5

  learner = Worker('learner', fire, 0, [], [Endpoint(reports)], 10, until)
  must_end(lambda: loops.run([learner, reports.writer(write)]))
  assert written == [0, 1, 2, 3, 4]
  reports.wait_written()  # nothing is left


def test_the_learner_does_not_wait_for_a_writer_that_has_failed():
  reports = ReportQueue()
  waited = []

  def write(report):
    if report == 1:
      raise ValueError('disk full')

  def until(k):
    if k == 2:
      try:
        reports.wait_written()
      except Closed as error:
        waited.append(error)
        raise
    return False

  learner = Worker('learner', lambda k: (k + 1, [Versioned(k, k)]), 0, [], [Endpoint(reports)], 10,
                   until)
  with pytest.raises(ValueError, match='disk full'):
    must_end(lambda: loops.run([learner, reports.writer(write)]))
  assert len(waited) == 1


# States of actors.


def test_states_of_an_actor_are_found_by_its_rollouts_and_earlier_ones_are_forgotten():
  states = ActorStates('first')
  assert states.after(0) == 'first'
  for number in (1, 2, 3):
    states.add(f'after {number}')
  assert [states.after(number) for number in (0, 1, 1, 3)] == [
      'first', 'after 1', 'after 1', 'after 3']
  with pytest.raises(KeyError):
    states.after(2)
  with pytest.raises(KeyError):
    states.after(4)


def positions_of(config, updates):
  """Returns the positions of a run: updates, and what environments were sent, [updates, ...]."""
  run = prepared(config)
  numbers = []
  sent = []

  def after(position, wait_written):
    numbers.append(position.update)
    assert int(position.state.update) == position.update
    # An actor of a program has made as many rollouts as were learned from, though it may be ahead.
    for actor in position.actors():
      assert [int(env.rollouts) for env in actor.envs] == [position.update] * len(actor.envs)
    sent.extend([np.asarray(x) for x in update] for update in position.sent)
    return False

  with build.segment(run, build.Snapshot(initial_state(run)), updates, lambda report: None,
                     build.Events(after=after)) as segment:
    loops.run(segment.workers)
  return numbers, sent


@pytest.mark.parametrize('scheme, lag', [('cleanba', 1), ('dppo', 0), ('fused', 0)])
def test_positions_have_what_was_sent_in_each_update(scheme, lag):
  config = changed(small('ppo', num_shards=2, num_grad_shards=2),
                   placement__updates_per_call=3 if scheme == 'fused' else 1)
  numbers, sent = positions_of(changed(config, scheme=scheme), 5)
  assert numbers == ([3, 5] if scheme == 'fused' else [1, 2, 3, 4, 5])
  assert np.shape(sent) == (5, 2, 8, 4) and {x.dtype for of in sent for x in of} == {np.dtype('u1')}
  if not lag:
    np.testing.assert_array_equal(sent, positions_of(changed(config, scheme='sync'), 5)[1])
  assert len({np.array(x).tobytes() for x in sent}) == 5


@pytest.mark.parametrize('config', [
    of_functions(scheme='sync'), of_functions(scheme='fused'),
    changed(small(), scheme='impala'), changed(small(), scheme='impala', env_batch=4)])
def test_positions_of_functions_and_of_other_schemes_have_nothing_sent(config):
  _, sent = positions_of(config, 2)
  assert sent == []


def test_before_is_what_actors_got_before_the_last_update():
  run = prepared(changed(small(), scheme='cleanba'))
  learned = [jax.device_get(initial_state(run).params)]
  checked = []

  def after(position, wait_written):
    before = jax.device_get(position.before().params)
    jax.tree.map(np.testing.assert_array_equal, before, learned[-1])
    checked.append(position.update)
    learned.append(jax.device_get(position.state.params))
    return position.update == 4

  with build.segment(run, build.Snapshot(initial_state(run)), 10**6, lambda report: None,
                     build.Events(after=after)) as segment:
    loops.run(segment.workers)
  assert checked == [1, 2, 3, 4]
