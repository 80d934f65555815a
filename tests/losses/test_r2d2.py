"""R2D2 compared with plain NumPy, in rollouts of real environments, and with what it must hold."""

import dataclasses
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses, testing
from podracer_jit.agents.networks import MLP, TorsoOptions
from podracer_jit.envs.protocol import EnvSpec
from podracer_jit.losses.algorithm import Batch
from podracer_jit.losses.items import sequences
from podracer_jit.types import Rollout, Target, TrainState
from tests.agents.test_recurrent import gru
from tests.made import bound
from tests.reference import numeric_gradient, random_ends
from tests.runs import changed, prepared, run, small

BURN_IN, TRACE, N_STEP = 3, 6, 3
LENGTH = BURN_IN + TRACE + N_STEP - 1
OBS, ACTIONS, SIZE = 4, 3, 5
SPEC = EnvSpec('Test-v0', (OBS,), np.dtype(np.float32), ACTIONS, (), (), 1, 0)
ITEMS = 8
COUNT = 12.0  # sequences of the whole batch, of which a loss gets eight
DISCOUNT = 0.9
ETA = 0.7


def config_of(task=(), **fields):
  """Returns a small config; an episode takes at most 11 of the 11 rows of a sequence."""
  config = changed(small('r2d2', *task), num_minibatches=1, network__core='gru',
                   network__core_size=8, loss__burn_in=BURN_IN, loss__trace_length=TRACE,
                   loss__n_step=N_STEP, loss__target_every=3)
  config['env']['max_episode_steps'] = 11
  config['replay'] |= dict(capacity=64, min_size=16, batch_size=8, gradient_steps=2)
  return changed(config, **fields)


def h(x):
  """Rescales a value: the equation before that of the targets in section 2.3."""
  return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x


def inverse(x):
  return scipy.optimize.brentq(lambda y: h(y) - x, -1e4, 1e4, xtol=1e-12, rtol=1e-14)


def dense(w, name, x):
  return x @ w[name]['kernel'] + w[name]['bias']


def unroll(w, obs, state, valid):
  """Returns the action values of rows in order, and the state after them."""
  values = []
  for x, row_is_valid in zip(obs, valid, strict=True):
    x = np.tanh(dense(w['torso'], 'Dense_0', x))
    state, y = gru(w['core'], state, x)
    streams = [dense(w, name, np.maximum(dense(w, f'{name}_hidden', y), 0))
               for name in ('value', 'advantage')]
    values.append(streams[0] + streams[1] - streams[1].mean())
    state = state if row_is_valid else np.zeros(SIZE)
  return np.array(values), state


def values_after_burn_in(w, of_burn_in, rows, n):
  """Returns the action values of rows BURN_IN to LENGTH of sequence n.

  Args:
    w: weights.
    of_burn_in: weights that bring the stored state up to date.
    rows: the sequences.
    n: one of them.
  """
  obs, valid = rows.obs[:, n], [*rows.valid[:, n], True]
  _, state = unroll(of_burn_in, obs[:BURN_IN], np.float64(rows.carry[0, n]), valid[:BURN_IN])
  return unroll(w, obs[BURN_IN:], state, valid[BURN_IN:])[0]


def targets(params, target, rows, n):
  """Yields (row, target) of each valid row of sequence n that is learned from."""
  q = values_after_burn_in(params, params, rows, n)
  q_target = values_after_burn_in(target, target, rows, n)
  for t in range(BURN_IN, BURN_IN + TRACE):
    if not rows.valid[t, n]:
      continue
    total, gamma, last = 0.0, 1.0, t
    for last in range(t, t + N_STEP):
      total += gamma * rows.reward[last, n]
      gamma *= DISCOUNT * (not rows.terminated[last, n])
      if rows.terminated[last, n] or rows.truncated[last, n]:
        break
    after = last + 1 - BURN_IN
    yield t, h(total + gamma * inverse(q_target[after, q[after].argmax()]))


def errors(w, params, target, rows, n):
  """Returns the TD errors of sequence n by the weights w, with fixed targets and burn-in."""
  q = values_after_burn_in(w, params, rows, n)
  return np.array([y - q[t - BURN_IN, rows.action[t, n]]
                   for t, y in targets(params, target, rows, n)])


def case():
  """Returns an algorithm, a state whose target network has other weights, and a batch."""
  algorithm = bound(
      losses.R2D2(burn_in=BURN_IN, trace_length=TRACE, n_step=N_STEP, discount=DISCOUNT, eta=ETA),
      spec=SPEC, torso=MLP((6, 4)), torso_options=TorsoOptions('gru', SIZE))
  rng = np.random.default_rng(2)
  shapes = algorithm.state_shapes.params
  params, target = (jax.tree.map(
      lambda x: np.float32(rng.normal(size=x.shape) / np.sqrt(x.shape[0])), shapes)
      for _ in range(2))
  ends = [random_ends(rng, LENGTH, carried=n % 3 == 0, probability=0.2) for n in range(ITEMS)]
  terminated, truncated, valid = (np.stack(x, axis=1) for x in zip(*ends, strict=True))
  rows = Rollout(
      obs=np.float32(rng.normal(size=(LENGTH + 1, ITEMS, OBS))),
      action=rng.integers(0, ACTIONS, (LENGTH, ITEMS), np.int32), extras=None,
      reward=np.float32(3 * rng.normal(size=(LENGTH, ITEMS))), terminated=terminated,
      truncated=truncated, valid=valid, episodes=None,
      carry=np.float32(rng.normal(size=(1, ITEMS, SIZE))))
  # Ends in the burn-in, among the rows that are learned from, and behind them.
  over = terminated | truncated
  assert over[:BURN_IN].any() and over[BURN_IN + TRACE:].any() and not valid[0].all()
  assert (terminated & valid)[BURN_IN:].any() and (truncated & ~terminated)[BURN_IN:].any()
  state = TrainState(params, None, None, 0, None, Target(target, jnp.int32(0)))
  weight = np.float32(rng.uniform(0.5, 1, ITEMS))
  return algorithm, state, Batch(rows, None, weight, np.float32(COUNT), None)


def weights_of(state):
  """Returns the weights of both networks in 64 bits."""
  return (jax.tree.map(np.float64, params['params']) for params in (state.params,
                                                                    state.target.params))


def test_the_loss_and_priorities_are_those_of_the_paper():
  algorithm, state, batch = case()
  params, target = weights_of(state)
  loss, aux = jax.jit(algorithm.loss)(state.params, state, batch, None)
  error = [errors(params, params, target, batch.items, n) for n in range(ITEMS)]
  assert min(map(len, error)) > 1
  by_sequence = np.array([(0.5 * x ** 2).sum() for x in error])
  assert_allclose(loss, (batch.weight * by_sequence).sum() / TRACE / COUNT, rtol=1e-4)
  assert_allclose(aux.priority, [ETA * abs(x).max() + (1 - ETA) * abs(x).mean() for x in error],
                  rtol=1e-4)
  assert aux.valid == sum(map(len, error))
  assert_allclose(aux.terms['abs_td_error'], sum(abs(x).sum() for x in error), rtol=1e-4)
  assert_allclose(aux.terms['loss'], (batch.weight * by_sequence).sum(), rtol=1e-4)


def test_the_gradient_flows_through_the_learned_rows_only():
  """Neither through the burn-in nor through targets, which finite differences leave as they are."""
  algorithm, state, batch = case()
  params, target = weights_of(state)
  gradient, _ = jax.jit(algorithm.gradient)(state, batch, None)
  flat, unravel = jax.flatten_util.ravel_pytree(state.params['params'])
  flat = np.float64(flat)
  checked = slice(0, None, 9)  # every ninth parameter

  def loss(some):
    x = flat.copy()
    x[checked] = some
    # `unravel` would round to 32 bits.
    leaves, treedef = jax.tree.flatten(state.params['params'])
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]
    w = treedef.unflatten([part.reshape(leaf.shape) for part, leaf in zip(
        np.split(x, sizes), leaves, strict=True)])
    return sum(weight * (0.5 * errors(w, params, target, batch.items, n) ** 2).sum()
               for n, weight in enumerate(batch.weight)) / TRACE / COUNT

  # The streams' gradients are scaled where they meet (1511.06581, section 4.2).
  scale = {name: jax.tree.map(lambda x, below=name in ('torso', 'core'): np.full(
      x.shape, 2 ** -0.5 if below else 1.0), part) for name, part in state.params['params'].items()}
  numeric = numeric_gradient(loss, flat[checked]) * jax.flatten_util.ravel_pytree(scale)[0][checked]
  computed = jax.flatten_util.ravel_pytree(gradient['params'])[0][checked]
  assert unravel and (abs(numeric) > 1e-4).mean() > 0.5
  assert_allclose(computed, numeric, rtol=2e-3, atol=2e-5)


def test_rescaling_by_hand():
  """h(3) = sqrt(4) - 1 + 0.003; h(-8) = -(sqrt(9) - 1) - 0.008."""
  assert h(3.0) == pytest.approx(1.003) and h(-8.0) == pytest.approx(-2.008)
  assert inverse(h(17.0)) == pytest.approx(17.0)


# Real environments.


PIXELS = 'Pong-v5', 'nature_cnn'


@pytest.mark.parametrize('task, period', [((), 1), ((), 3), (PIXELS, 1)])
def test_the_learner_finds_the_priorities_that_actors_gave(task, period, monkeypatch):
  """With the parameters of acting, stored states and burn-in give the values of acting.

  Sequences begin in each rollout, or in each third one; each has rows of three rollouts. Pixels are
  stacks of frames, of which the replay has each frame once.
  """
  prepared_run = prepared(config_of(
      task, replay__priority_exponent=1.0, replay__capacity=640, loss__period=period))
  monkeypatch.setattr(testing, '_num_rollouts', lambda experiment: 8)
  state, experiences = testing._collect(prepared_run)
  source = prepared_run.learner.source
  state = prepared_run.learner.allocate(state)
  insert = jax.jit(source.insert)
  for experience in experiences:
    state, _ = insert(state, experience, source.blocks.numbers())
  place = np.flatnonzero(np.asarray(state.replay.priorities[0][0]))
  given = np.asarray(state.replay.priorities[0][0])[place]
  items = jax.jit(source.store.read)(state.replay, place)

  # Rollout r begins in row 8 + 8 r of the ring; the priority of an item comes with row 11 after it.
  rollout, env = place // 8 - 1, place % 8
  begun = [r for r in range(8) if r % period == 0 and 8 * r + LENGTH < 64]
  assert_array_equal(np.unique(rollout), begun)
  assert len(place) == 8 * len(begun) == state.replay.size[0] == state.replay.inserted[0]
  for name in ('action', 'reward', 'terminated', 'truncated', 'valid'):
    rows = np.concatenate([getattr(x, name) for x in experiences])
    expected = np.stack([rows[8 * r:8 * r + LENGTH, e] for r, e in zip(rollout, env, strict=True)],
                        axis=1)
    assert_array_equal(getattr(items, name), expected)
  assert_array_equal(items.carry[0], [experiences[r].carry[0, e]
                                      for r, e in zip(rollout, env, strict=True)])
  assert np.abs(items.carry).max(axis=-1).astype(bool).mean() > 0.5

  algorithm = prepared_run.experiment.algorithm
  weight = np.ones(len(place), np.float32)
  _, aux = jax.jit(algorithm.loss)(state.params, state._replace(
      target=state.target._replace(params=state.params), replay=None),
      Batch(items, None, weight, np.float32(len(place)), None), None)
  # The inverse of the rescaling loses four digits in 32 bits.
  assert_allclose(given, np.asarray(aux.priority) + 1e-6, rtol=1e-4, atol=1e-4)
  valid = np.asarray(items.valid)
  assert not valid.all() and (bool(task) or period > 1 or not valid[0].all())


@pytest.mark.parametrize('fields', [{}, dict(network__core='lstm'), dict(network__core='none'),
                                    dict(loss__burn_in=0, loss__period=2)])
def test_it_holds_what_an_algorithm_must_hold(fields):
  assert testing.check(losses.R2D2, config_of(**fields))


@pytest.mark.parametrize('fields', [{}, dict(loss__period=2, network__core='lstm')])
def test_a_run_is_the_same_in_one_program_and_on_two_devices(fields):
  config = config_of(num_grad_shards=2, num_shards=2, **fields)
  of_sync = run(config, updates=8)[0]
  assert len({params for _, params in of_sync}) > 3
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)), updates=8)[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)), updates=8)[0] == of_sync


def test_the_target_network_is_a_copy_of_each_third_gradient_step():
  state = run(config_of(), updates=5)[2]
  assert int(state.target.gradient_steps) == 6
  jax.tree.map(assert_array_equal, state.target.params, state.params)


def test_free_rates_count_sequences():
  """Four are drawn for each one that is added, one in eight rows."""
  config = config_of(scheme='apex', placement__learner_devices=(1,), env__renew_every_updates=0,
                     replay__samples_per_insert=4.0, replay__tolerance=24)
  reports = run(config, updates=40)[1]
  added, drawn = (np.array([int(jax.device_get(report.metrics[name])[0]) for report in reports])
                  for name in ('valid', 'sampled'))
  start = int(np.argmax(drawn > 0)) + 1
  ahead = np.cumsum(drawn[start:]) - 4 / 8 * np.cumsum(added[start:])
  assert len(ahead) > 20 and drawn[start:].sum() > 8 * 16 and np.abs(ahead).max() <= 24
  with pytest.raises(ValueError, match=r'replay.tolerance: must be at least 24, half of what a '
                     r'call draws \(16\) and a rollout allows \(0.5 x 64\), got 23'):
    prepared(changed(config, replay__tolerance=23))


# What is refused.


@dataclasses.dataclass(frozen=True)
class OddPeriod(losses.R2D2):
  """Its sequences do not begin where rollouts begin."""

  def items(self):
    return sequences(LENGTH, 12)


@pytest.mark.parametrize('fields, message', [
    (dict(replay__eviction='prioritised'), 'replay.eviction: the sequences of r2d2 overlap, so '
     'their rows are stored once, in a ring; must be fifo, got prioritised'),
    (dict(env_batch=4, scheme='apex'), 'env_batch: r2d2 draws from a replay, which needs the rows '
     'of all environments in order; must be 0'),
    (dict(replay__capacity=7, replay__min_size=4),
     'replay.capacity: must be at least env.num_envs = 8, got 7'),
    (dict(num_grad_shards=2, replay__batch_size=9), 'replay.batch_size: 9 sequences cannot be '
     'split evenly by num_grad_shards = 2'),
    (dict(replay__capacity=2**30), 'replay.capacity: 1073741824 sequences of 8 new rows, and 21 '
     'rows of env.num_envs = 8 that cannot be drawn, are 8,589,934,760; must be below 2^31'),
    (dict(network__separate_critic=True, network__core='none'),
     'network.separate_critic: r2d2 has no use for it'),
    (dict(normalise__obs=True), 'normalise.obs: r2d2 cannot learn normalised observations'),
    (dict(env__task='Pendulum-v1'), 'loss.name: r2d2 wants discrete actions'),
    (dict(loss__trace_length=0), 'loss.trace_length: must be at least 1, got 0')])
def test_what_does_not_fit_is_refused(fields, message):
  with pytest.raises(ValueError, match='^' + re.escape(message)):
    prepared(config_of(**fields))


def test_sequences_that_do_not_begin_with_rollouts_are_refused():
  name = f'{__name__}:OddPeriod'
  config = config_of(loss__name=name)
  with pytest.raises(ValueError, match=f'^unroll_length: sequences of {name} begin every 12 rows, '
                     'and the state before them is known where rollouts begin; must be a divisor '
                     'of 12, got 8$'):
    prepared(config)
