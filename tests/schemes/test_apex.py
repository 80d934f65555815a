"""Learning from a replay: ages and delays, exact after a resume, or at limited rates."""

import copy
import dataclasses
import functools
import json
import re
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit import experiment, loops, losses
from podracer_jit.actor import faults
from podracer_jit.agents.optimizers import Adam
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner.from_replay import FromReplay
from podracer_jit.losses.algorithm import Aux
from podracer_jit.numerics.groups import Groups
from podracer_jit.play import evaluation
from podracer_jit.replay import buffer, tree
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.types import Target, TrainState
from tests.made import bound
from tests.runs import changed, open_workdir, prepared, run, small, train_in
from tests.workers import wrap

UPDATES = 8


def config(kind, **fields):
  """Returns a config whose updates have 256 rows in two groups; the replay is full in update 3."""
  loss, network, task = {
      'dqn': ('dqn', 'mlp', 'CartPole-v1'), 'dpg': ('dpg', 'deterministic', 'CartpoleSwingup-v1'),
      'pixels': ('dqn', 'nature_cnn', 'Pong-v5'), 'r2d2': ('r2d2', 'mlp', 'CartPole-v1'),
      'sac': ('sac', 'mlp', 'Pendulum-v1'), 'td3': ('td3', 'mlp', 'Pendulum-v1')}[kind]
  result = experiment.config(
      loss, network, 'adam' if kind in ('dpg', 'sac', 'td3') else 'centred_rmsprop', scheme='sync',
      unroll_length=16, num_shards=2, num_grad_shards=2)
  result.env.task = task
  result.env.num_envs = 16
  if kind == 'pixels':
    result.env.update(dict(img_height=21, img_width=21, max_episode_steps=12, noop_max=4))
    result.network.update(dict(channels=(8, 16), kernels=(4, 3), strides=(4, 1), hidden=32))
    result.microbatch_rows = 64
  if kind == 'dpg':
    result.network.update(dict(actor_hidden=(32, 16), critic_hidden=(32, 16)))
    result.replay.eviction = 'prioritised'
  if kind not in ('sac', 'td3'):
    result.loss.target_every = 5
  result.optimizer.learning_rate = 1e-3
  # Batches are large, because XLA does not split sums of few rows between threads.
  result.replay.update(dict(capacity=600, min_size=300, gradient_steps=3,
                            batch_size=640 if kind == 'pixels' else 4096))
  if kind == 'r2d2':
    result.network.update(dict(core='gru', core_size=16))
    result.loss.update(dict(burn_in=4, trace_length=16, n_step=3))
    result.replay.update(dict(capacity=96, min_size=32, batch_size=64))  # sequences
  result.env.renew_every_updates = UPDATES
  return changed(result.to_dict(), **fields)


def run_of(kind, **fields):
  """Returns the Run of a config; tests on the same devices share it."""
  return prepared(config(kind, **fields))


def run_on(kind, scheme, runner=loops.run, actors=(0,), learners=(0,)):
  return run(config(kind, scheme=scheme, placement__actor_devices=actors,
                    placement__learner_devices=learners), runner)


def test_delays_of_apex_lockstep_are_exact():
  """Rollouts after the first come 3 gradient steps late, and the first update draws nothing."""
  _, reports, state = run_on('dqn', 'apex_lockstep')
  assert [report.cgd for report in reports] == [(0.0,)] + [(3.0,)] * (UPDATES - 1)
  assert int(state.target.gradient_steps) == 3 * (UPDATES - 1)


@pytest.mark.parametrize('scheme', ['sync', 'apex_lockstep', 'apex'])
def test_the_episodes_of_a_report_tell_their_environments(scheme):
  """`greediest_return` needs them; with `apex` the rollouts of an update are those that came."""
  reports = run_on('dqn', scheme, actors=(0, 1))[1]
  ids = [faults.envs(jax.tree.map(lambda x: np.asarray(x)[0], report.metrics['episodes']))
         for report in reports if np.size(report.metrics['episodes'].ended)]
  assert ids
  for columns in ids:
    if scheme == 'apex':
      assert all(shard.tolist() in ([*range(8)], [*range(8, 16)])
                 for shard in columns.reshape(-1, 8))
    else:
      assert columns.tolist() == [*range(16)]


@pytest.mark.parametrize('updates, is_copy', [(5, False), (6, True)])
def test_the_target_network_is_a_copy_of_each_fifth_gradient_step(updates, is_copy):
  state = run(config('dqn'), updates=updates)[2]
  assert int(state.target.gradient_steps) == 3 * (updates - 1)  # 12, 15
  equal = jax.tree.map(np.array_equal, state.target.params, state.params)
  assert jax.tree.all(equal) == is_copy


@pytest.mark.full
def test_the_age_of_samples_is_counted_in_gradient_steps():
  """Compares the mean age of samples with the mean age of all rows in the replay.

  All rows can be drawn with equal priorities, so the two differ by the length of a stratum at most.
  """
  fields = dict(replay__capacity=2048, replay__priority_exponent=0.0, num_grad_shards=1)
  reports = run(config('dqn', **fields))[1]
  ages = [float(jax.device_get(report.metrics['sampled_age'])[0]) for report in reports]
  sizes = [int(jax.device_get(report.metrics['replay_size'])[0]) for report in reports]
  valid = [int(jax.device_get(report.metrics['valid'])[0]) for report in reports]
  for u in range(1, UPDATES):  # takes gradient steps 3 (u - 1) to 3 u
    count = [*valid[:u], sizes[u] - sum(valid[:u])]  # the newest rows are not complete yet
    added_at = 3 * np.maximum(np.arange(u + 1) - 1, 0)
    assert ages[u] == pytest.approx(np.sum(count * (3 * (u - 1) + 1 - added_at)) / sizes[u],
                                    abs=0.02)


def test_the_learning_rate_metric_is_the_rate_of_the_update():
  """The metric has the rate at the steps before the update, as for losses without a replay."""
  params = {'w': jnp.ones(3)}
  state = TrainState(params, (), jnp.int32(0), jnp.int32(50), jax.random.key(0),
                     Target(params, jnp.int32(3)), types.SimpleNamespace(
                         size=jnp.array([5]), priorities=tree.init(1, 5)))
  algorithm = bound(losses.DQN(), optimizer=Adam(learning_rate=1.0, anneal=True), total_steps=100)
  store = buffer.Replay(5, Groups(1, 4), 1, 1, algorithm.items(), 'fifo', 0.6, 0.0)
  source = FromReplay(algorithm, Groups(1, 4), store, ReplayOptions(batch_size=2), 0)
  sums = dict(aux=Aux(dict(loss=1.0), 2.0), sampled_age=0.0, grad_norm=1.0)
  after, metrics = source.finish(state, jnp.int32(1), sums, jnp.int32(25), jnp.zeros(2, jnp.uint32))
  assert metrics['learning_rate'] == 0.5 and metrics['steps'] == after.steps == 75


def _train(workdir, total, learners=(0,), **fields):
  fields = config('dpg', total_steps=total, env__renew_every_updates=4, **fields)
  open_workdir(workdir, fields | dict(total_steps=10**6))
  placed = run_of('dpg', scheme='sync', placement__actor_devices=(0,),
                  placement__learner_devices=learners)
  train_in(dataclasses.replace(placed, experiment=resolve(fields)), workdir)
  receipts = [json.loads(line) for line in (workdir / 'receipts.jsonl').read_text().splitlines()]
  return [(x['update'], x['batch'], x['params']) for x in receipts if 'update' in x]


@pytest.mark.parametrize('stop', [pytest.param(6, marks=pytest.mark.quick),
                                  pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.same_bits('resumed on another mesh', 'DPG')
def test_a_resumed_run_has_the_same_bits_on_another_mesh(stop, tmp_path):
  """Segments have 4 updates."""
  uninterrupted = _train(tmp_path / 'one', 8 * 256)
  assert len(uninterrupted) == 8
  assert len(_train(tmp_path / 'two', stop * 256)) == stop
  assert _train(tmp_path / 'two', 8 * 256, (1, 2)) == uninterrupted


def test_the_workdir_of_an_apex_run_with_several_actors_can_be_read(tmp_path):
  """One actor would need a larger tolerance, because its rollouts add more rows."""
  fields = config('dqn', scheme='apex', replay__samples_per_insert=2.0, replay__tolerance=6272,
                  placement__actor_devices=(0, 1))
  resolve(fields)
  open_workdir(tmp_path, fields)
  evaluation.read_experiment(tmp_path)


@pytest.mark.full
def test_evaluation_does_not_explore(tmp_path):
  """Evaluations ignore the key of the noise; an algorithm that explores depends on the key."""
  _train(tmp_path, 4 * 256)
  agent = evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path))

  def play(agent, key):
    with evaluation.game(agent, [-2, -3], jax.random.key(key), 1000) as (_, program, state):
      return jax.device_get(program(agent.params, state)[1].episode_return)
  first = play(agent, 0)
  assert (play(agent, 1) == first).all()

  class Noisy(losses.DPG):
    def act(self, params, obs, carry, valid, key, exploration):
      return super().act(params, obs, carry, valid, key, jnp.ones(len(obs)))
  noisy = agent._replace(algorithm=Noisy().bind(agent.algorithm.parts))
  assert (play(noisy, 0) != play(noisy, 1)).any()


def test_without_a_stored_replay_learning_waits_until_the_replay_is_filled_again(tmp_path):
  """A run that is not stopped keeps its replay, also over the end of its segment of 4 updates."""
  one, two = tmp_path / 'one', tmp_path / 'two'
  uninterrupted = _train(one, 7 * 256, checkpoint__replay=False)
  _train(two, 3 * 256, checkpoint__replay=False)
  resumed = _train(two, 7 * 256, checkpoint__replay=False)
  assert [a == b for a, b in zip(resumed, uninterrupted, strict=True)] == [True] * 3 + [False] * 4
  for workdir, steps, empty in ((one, [3] * 6, None), (two, [3, 3, 0, 3, 3, 3], 3)):
    assert not list(workdir.glob('checkpoints/*/replay'))
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    assert list(np.diff([row['gradient_steps'] for row in rows])) == steps
    assert [i for i in range(1, 7) if rows[i]['replay_size'] < 300] == [empty] * bool(empty)


def _stalled(name, seconds):
  """Delays a worker, or all workers of one kind, after three firings together."""
  calls = []

  def stall(*_):
    calls.append(1)
    time.sleep(seconds if len(calls) > 3 else 0)
  return wrap(name, before=stall)


def _free(learners=(2,), **fields):
  """Returns arguments of `run` for an apex run with two actors.

  The programs do not depend on `fields`, so that all tests share them.
  """
  shared = run_of('dqn', scheme='apex', placement__actor_devices=(0, 1), replay__batch_size=128,
                  placement__learner_devices=learners, env__renew_every_updates=0)
  assert shared.learner.programs  # compiled before the copy, so that the copy shares them
  learner = copy.copy(shared.learner)
  learner.source = copy.copy(learner.source)
  learner.source.options = resolve(changed(dict(shared.experiment.fields), **fields)).replay
  return dict(config=None, prepared_run=dataclasses.replace(shared, learner=learner))


def test_a_stalled_actor_does_not_stall_the_learner():
  stalls = [_stalled('actor 0', 0.2), _stalled('actor 1', 0.05)]
  _, reports, state = run(**_free(), updates=40, tamper=lambda w: stalls[0](stalls[1](w)))
  # The second rollout of actor 1 comes after the first 3 gradient steps, so it is that late.
  assert reports[0].cgd == (0.0,) and max(report.cgd[0] for report in reports) >= 3
  added = [int(jax.device_get(report.metrics['valid'])[0]) for report in reports]
  assert int(state.update) == 40 and added.count(0) > 0
  drawn = [int(jax.device_get(report.metrics['sampled'])[0]) for report in reports]
  assert set(drawn) == {0, 3 * 128} and drawn[0] == 0
  # The environments of both actors are in the replay.
  assert (jax.device_get(state.replay.inserted) > 0).all()


def test_the_delay_is_that_of_the_rollouts_that_arrived():
  ages = []

  def noting(workers):
    def note(worker):
      def fire(carry, arrived):
        before = int(jax.device_get(carry.train.target.gradient_steps))
        ages.append([before - item.version for item in arrived.value])
        return worker.fire(carry, arrived)
      return worker._replace(fire=fire) if worker.name == 'learner' else worker
    return list(map(note, workers))

  _, reports, _ = run(**_free(), updates=20, tamper=noting)
  # Without a rollout, the delay of the one before is told again.
  expected = [0.0]
  for of_update in ages:
    expected.append(sum(of_update) / len(of_update) if of_update else expected[-1])
  assert [report.cgd for report in reports] == [(late,) for late in expected[1:]]
  assert max(expected) > 0


def test_a_stalled_learner_loses_no_rollout():
  _, reports, state = run(**_free(), updates=12, tamper=_stalled('learner', 0.1))
  added = [int(jax.device_get(report.metrics['valid'])[0]) for report in reports]
  assert max(added) > 128  # several rollouts in one update
  assert int(state.steps) == sum(added)
  episodes = sum(int(np.sum(jax.device_get(r.metrics['episodes'].ended))) for r in reports)
  assert episodes > 0


@pytest.mark.parametrize('ratio, most', [(0.0, 10**9), (2.0, 4)])
def test_actors_wait_for_gradient_steps_only_if_a_ratio_is_set(ratio, most):
  """While the learner takes its fourth turn, rollouts of a whole replay may wait to be added.

  With a ratio, each actor has one in the queue and one in its hands.
  """
  changed_counts = threading.Condition()
  counts = {'actor 0': 0, 'actor 1': 0}
  during = []

  def counted(name):
    def count(*_):
      with changed_counts:
        counts[name] += 1
        changed_counts.notify_all()
    return wrap(name, before=count)

  def turn(call, *_):
    if call.number == 4:
      with changed_counts:
        before = sum(counts.values())
        # The replay keeps 600 items, which are 6 rollouts.
        changed_counts.wait_for(lambda: sum(counts.values()) >= before + 5, 2 if ratio else 30)
        during.append(sum(counts.values()) - before)

  free = _free(replay__samples_per_insert=ratio, replay__tolerance=1024)
  run(**free, updates=8, tamper=lambda workers: wrap('learner', before=turn)(
      counted('actor 0')(counted('actor 1')(workers))))
  assert during[0] <= most and (ratio or during[0] >= 5)


@pytest.mark.same_bits('1 and 2 learners, 1 and 3 actors', 'DQN: 360 environments, batches of 512')
def test_360_environments_share_batches_of_512_in_16_groups_on_any_devices():
  """1803.00933, section 4.1. The rows of 360 environments are in 8 blocks, the largest number that
  16 groups allow.
  """
  fields = dict(env__num_envs=360, num_shards=3, num_grad_shards=16, unroll_length=4,
                replay__capacity=6000, replay__batch_size=512, replay__gradient_steps=2,
                env__renew_every_updates=4)

  def of(scheme, actors, learners):
    return config('dqn', scheme=scheme, placement__actor_devices=actors,
                  placement__learner_devices=learners, **fields)

  assert resolve(of('apex_lockstep', (0,), (0,))).replay_blocks == 8
  expected, reports, state = run(of('apex_lockstep', (0,), (0,)))
  assert [int(jax.device_get(r.metrics['sampled'])[0]) for r in reports] == [1024] * 4
  assert run(of('apex_lockstep', (0, 1, 2), (3, 4)))[0] == expected
  # Actors with rates of their own have whole blocks.
  reports, state = run(of('apex', (0, 1, 2), (3, 4)), updates=12)[1:]
  assert state.replay.ring.head.shape == (24,)
  assert (np.asarray(state.replay.ring.head) > 0).reshape(3, 8).any(axis=1).all()
  assert int(jax.device_get(reports[-1].metrics['sampled'])[0]) == 1024


def test_items_beyond_the_capacity_go_every_so_many_gradient_steps():
  """Updates take 3 gradient steps, and the 6th, 12th and 18th evict: of updates 3, 5 and 7."""
  reports = run(config('dqn', replay__evict_every=6))[1]
  sizes = [int(jax.device_get(report.metrics['replay_size'])[0]) for report in reports]
  steps = [int(jax.device_get(report.metrics['gradient_steps'])[0]) for report in reports]
  assert steps == [0, 3, 6, 9, 12, 15, 18, 21]
  capacity = 38 * 16  # whole rows
  assert [size <= capacity for size in sizes] == [True, True, True, False, True, False, True, False]
  every = run(config('dqn', replay__evict_every=1))[1]
  at_once = run(config('dqn'))[1]
  # An eviction at each gradient step leaves what an eviction at each addition leaves.
  assert [int(jax.device_get(r.metrics['replay_size'])[0]) for r in every] == [
      int(jax.device_get(r.metrics['replay_size'])[0]) for r in at_once]


@pytest.mark.parametrize('slow, learners, tolerance', [
    ('learner', (2,), 1024), ('learner', (2, 3), 320), ('actor', (2,), 320)])
def test_samples_per_insert_is_kept_within_its_tolerance(slow, learners, tolerance):
  """Checks the tolerance after every update, from the second one that draws."""
  ratio = 2.0  # an update draws 384, a rollout adds up to 128: 320 is the least tolerance
  free = _free(learners, replay__samples_per_insert=ratio, replay__tolerance=tolerance)
  _, reports, _ = run(**free, updates=60, tamper=_stalled(slow, 0.02))
  added, drawn = (np.array([int(jax.device_get(report.metrics[name])[0]) for report in reports])
                  for name in ('valid', 'sampled'))
  start = int(np.argmax(drawn > 0)) + 1
  ahead = np.cumsum(drawn[start:]) - ratio * np.cumsum(added[start:])
  assert len(ahead) > 40 and np.abs(ahead).max() <= tolerance
  assert np.abs(ahead).max() > tolerance / 4  # the limit took effect


@pytest.mark.parametrize('name', ['actor 1', 'learner', 'writer'])
def test_an_error_of_any_worker_ends_an_apex_run(name):
  def fail(call, *_):
    if call.number == 4:
      raise ArithmeticError(name)

  with pytest.raises(ArithmeticError, match=name):
    run(**_free(), runner=functools.partial(loops.run, grace_s=10.0), updates=10**6,
        tamper=wrap(name, before=fail))


def test_actors_keep_their_parameters_for_params_every_rollouts():
  versions = []
  run(**_free(replay__params_every=3), updates=40, tamper=wrap(
      'actor 0', before=lambda call, state, params: versions.append(params.version)))
  count = len(versions) // 3 * 3
  assert np.ptp(np.reshape(versions[:count], (-1, 3)), axis=1).max() == 0
  assert len(set(versions)) > 2


def test_epsilons_and_noise_are_those_of_the_paper():
  """1803.00933, section 4.1: epsilon^(1 + alpha i / (N - 1)); by hand for N = 3."""
  dqn = losses.DQN()
  np.testing.assert_allclose(dqn.exploration(3), [0.4, 0.4 ** 4.5, 0.4 ** 8], rtol=1e-6)
  assert dqn.exploration(1) == np.float32(0.4)
  # Appendix B: a fixed set of six.
  six = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0)
  np.testing.assert_array_equal(losses.DQN(epsilons=six).exploration(8), [*six, 0.5, 0.25])
  np.testing.assert_array_equal(losses.DPG().exploration(16), np.full(16, np.float32(0.3)))
  # The actors get them in the order of the environments.
  acting = run_of('dqn', scheme='sync').acting
  np.testing.assert_array_equal(acting.exploration, dqn.exploration(16))
  assert prepared(small('ppo')).acting.exploration is None


@pytest.mark.parametrize('fields, message', [
    (dict(scheme='dppo'), 'scheme: dppo is for losses without a replay, loss.name is dqn'),
    (dict(scheme='impala'), 'scheme: impala is for losses without a replay'),
    (dict(num_epochs=2), 'num_epochs: dqn draws from a replay; must be 1, got 2'),
    (dict(normalise__reward=True), 'normalise.reward: dqn cannot learn normalised rewards'),
    (dict(network__core='gru'), 'network.core: dqn has no use for it; must be none'),
    (dict(network__separate_critic=True), 'network.separate_critic: dqn has no use for it'),
    (dict(env__task='CartpoleSwingup-v1'), 'loss.name: dqn wants discrete actions'),
    (dict(env__task='Pong-v5', replay__eviction='prioritised'),
     'replay.eviction: the frames of Pong-v5 are stored once, in a ring; must be fifo'),
    (dict(replay__eviction='lifo'), "replay.eviction: must be fifo or prioritised, got 'lifo'"),
    (dict(replay__capacity=200), 'replay.capacity: must be at least replay.min_size = 300, got'),
    (dict(replay__capacity=250, replay__min_size=10),
     'replay.capacity: must be at least env.num_envs * unroll_length = 256, got 250'),
    (dict(replay__batch_size=127), 'replay.batch_size: 127 transitions cannot be split evenly by '
     'num_grad_shards = 2; take a multiple of 2'),
    (dict(replay__priority_exponent=-0.1), 'replay.priority_exponent: must be between 0 and 2'),
    (dict(replay__eviction_exponent=0.4), 'replay.eviction_exponent: must be between -2 and 0'),
    (dict(replay__gradient_steps=0), 'replay.gradient_steps: must be at least 1, got 0'),
    (dict(replay__tolerance=-1), 'replay.tolerance: must not be negative, got -1'),
    (dict(scheme='apex', replay__samples_per_insert=2.0, replay__tolerance=6271),
     'replay.tolerance: must be at least 6400, half of what a call draws (12288) and a rollout '
     'allows (2 x 256), got 6271'),
    (dict(replay__samples_per_insert=2.0), 'replay.samples_per_insert: only with free rates of '
     'acting and learning; with sync'),
    (dict(replay__params_every=2), 'replay.params_every: only with free rates of acting and '
     'learning; with sync it must be 1'),
    (dict(network__hidden=()), 'network.hidden: must have at least one layer'),
    (dict(loss__epsilon=1.5), 'loss.epsilon: must be between 0 and 1, got 1.5'),
    (dict(env__num_envs=15, num_shards=3, placement__learner_devices=(0, 1)),
     'env.num_envs: 15 environments cannot be split evenly by 2 learner devices'),
    (dict(replay__capacity=700, replay__copies=3), 'replay.capacity: must be at least '
     'env.num_envs * unroll_length * replay.copies = 768, got 700'),
    (dict(replay__copies=0), 'replay.copies: must be at least 1, got 0'),
    (dict(replay__evict_every=-1), 'replay.evict_every: must not be negative, got -1'),
    (dict(policy='categorical'), "policy: must be one of auto, epsilon_greedy for the "
     "actions of CartPole-v1")])
def test_fields_that_do_not_fit_a_replay_are_refused(fields, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    prepared(config('dqn', **fields))


@pytest.mark.parametrize('scheme', ['apex', 'apex_lockstep'])
def test_schemes_with_a_replay_need_a_loss_with_a_replay(scheme):
  fields = experiment.config('ppo', 'mlp', 'adam', scheme=scheme).to_dict()
  fields['env']['task'] = 'CartPole-v1'
  with pytest.raises(ValueError, match=f'scheme: {scheme} is for losses with a replay'):
    prepared(fields)
