"""Options that change during a run, in real updates; and counts of steps beyond 2^31."""

import jax
import numpy as np
import pytest

from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.losses.algorithm import ForActors
from podracer_jit.numerics import counters
from podracer_jit.schedules import parse
from tests.runs import changed, initial_state, prepared, run, small
from tests.tiers import essential

TWO_DEVICES = dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1))
PPO = changed(small('ppo', total_steps=400), loss__clip='linear:0.3:0.1',
              loss__entropy_coef='cosine:0.1:0', loss__discount='piecewise:0.9:0.5=0.99',
              optimizer__max_grad_norm='linear:1:0.1:0.5', optimizer__anneal=False,
              optimizer__learning_rate='cosine:0.01:0.001:200steps')
DQN = changed(small('dqn', 'Catch-v0', total_steps=400),
              num_minibatches=1, loss__epsilon='linear:1:0.1', loss__n_step=2,
              replay__capacity=512, replay__min_size=64, replay__batch_size=16)
OF = {'ppo': PPO, 'dqn': DQN}


def metrics(reports, name):
  return np.concatenate([np.asarray(report.metrics[name][:report.count]) for report in reports])


@pytest.mark.parametrize('loss', OF)
def test_values_are_logged_and_computed_from_the_steps_before_the_update(loss):
  config = OF[loss]
  _, reports, _ = run(config)
  steps = [0, *metrics(reports, 'steps')[:-1]]
  for field in ('clip', 'entropy_coef', 'discount', 'epsilon'):
    text = config['loss'].get(field)
    if isinstance(text, str):
      expected = [float(parse(text).at(np.float32(done), 400)) for done in steps]
      np.testing.assert_allclose(metrics(reports, f'loss.{field}'), expected, rtol=1e-6)
      assert expected[0] != expected[-1]


@pytest.mark.parametrize('loss, fields', essential(
    [(loss, fields) for loss in OF for fields in (TWO_DEVICES, dict(scheme='fused'))],
    ('ppo', dict(scheme='fused')), ('dqn', TWO_DEVICES)))
def test_a_run_with_schedules_has_the_same_bits_on_any_placement(loss, fields):
  config = changed(OF[loss], num_shards=2, num_grad_shards=2)
  assert run(changed(config, **fields))[0] == run(config)[0]


def test_a_schedule_changes_what_is_learned():
  constant, changing = (run(config)[0] for config in (changed(PPO, loss__entropy_coef=0.1), PPO))
  assert constant[0] == changing[0]  # the schedule begins with 0.1
  assert constant[1] != changing[1]


def test_actors_explore_by_the_epsilon_of_their_parameters():
  prepared_run = prepared(changed(DQN, loss__epsilon='linear:1:0'))
  algorithm = prepared_run.experiment.algorithm
  state = prepared_run.initial_state()
  obs = np.zeros((8, *algorithm.parts.spec.obs_shape), algorithm.parts.spec.obs_dtype)

  def actions(steps):
    given = algorithm.for_actors(state._replace(steps=np.int32(steps)))
    now = algorithm.at(given.steps)
    keys = jax.random.split(jax.random.key(0), 64)
    return jax.vmap(lambda key: now.act(given.params, obs, None, np.ones(8, bool), key,
                                        now.exploration(8)).action)(keys)

  assert len(np.unique(actions(0)[:, 0])) == 3
  assert len(np.unique(actions(400)[:, 0])) == 1
  assert isinstance(algorithm.for_actors(state), ForActors)


@pytest.mark.parametrize('fields, message', [
    (dict(loss__discount='linear:0.9:0.99'), 'loss.discount: returns of a replay have one')])
def test_a_discount_that_a_replay_cannot_follow_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    prepared(changed(DQN, **fields))


@pytest.mark.parametrize('scheme', essential(['sync', 'fused', 'cleanba'], 'sync'))
def test_a_run_counts_beyond_32_bits(scheme):
  total = 5_700_000_000
  near = 2**32 - 100
  prepared_run = prepared(changed(PPO, total_steps=total, scheme=scheme))
  state = initial_state(prepared_run)
  state = state._replace(steps=jax.device_put(counters.of(near, state.steps), state.steps.sharding))
  reports = []
  with build.segment(prepared_run, build.Snapshot(state), 3, reports.append) as segment:
    train = loops.run(segment.workers)['learner'].train
  valid = metrics(reports, 'valid')
  steps = [counters.fetch_int(x) for x in metrics(reports, 'steps')]
  assert steps == list(near + np.cumsum(valid, dtype=np.int64))
  assert counters.fetch_int(train.steps) == steps[-1] > 2**32
  share = (near + int(valid[0])) / total
  np.testing.assert_allclose(metrics(reports, 'loss.clip')[1], 0.3 + (0.1 - 0.3) * share, rtol=1e-5)


@pytest.mark.parametrize('scheme', essential(['sync', 'fused'], 'fused'))
def test_a_run_beyond_32_bits_ends_at_its_total_steps(scheme):
  total = 2**32 + 100
  prepared_run = prepared(changed(PPO, total_steps=total, scheme=scheme))
  state = initial_state(prepared_run)
  state = state._replace(
      steps=jax.device_put(counters.of(total - 100, state.steps), state.steps.sharding))
  reports = []
  with build.segment(prepared_run, build.Snapshot(state), 6, reports.append) as segment:
    train = loops.run(segment.workers)['learner'].train
  assert total <= counters.fetch_int(train.steps) < total + 64
