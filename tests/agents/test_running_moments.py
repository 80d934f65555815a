"""Running moments compared with NumPy on all rows at once, and their use in an update."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import running_moments
from podracer_jit.agents.networks import NatureCNN
from podracer_jit.envs import frames
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import Batch
from podracer_jit.numerics.groups import Groups
from podracer_jit.types import Rollout, Transition
from tests.runs import changed, run, small
from tests.workers import wrap


def test_merged_moments_are_those_of_all_valid_rows():
  rng = np.random.default_rng(0)
  numbers = rng.normal(5.0, [0.1, 30.0], size=(4, 7, 3, 2)).astype(np.float32)
  valid = rng.random((4, 7, 3)) < 0.7
  moments = running_moments.initial((2,))
  assert_array_equal(running_moments.deviation(moments), [1, 1])
  for rollout, mask in zip(numbers, valid, strict=True):
    x = jnp.where(mask[..., None], rollout, 1e9)
    moments = running_moments.merge(moments, running_moments.measure(x, mask, Groups(1, 3)))
  valid_rows = numbers[valid].astype(np.float64)
  assert moments.count == len(valid_rows)
  assert_allclose(moments.mean, valid_rows.mean(axis=0), rtol=1e-5)
  assert_allclose(running_moments.deviation(moments), valid_rows.std(axis=0), rtol=1e-4)
  out = running_moments.standardise(moments, jnp.float32([[5.0, 5.0], [1e6, -1e6]]))
  assert_allclose(out[0], (5 - valid_rows.mean(axis=0)) / valid_rows.std(axis=0), atol=1e-3)
  assert_array_equal(out[1], [10, -10])


def test_merging_a_batch_without_valid_rows_changes_nothing():
  moments = running_moments.measure(jnp.ones((2, 3)), jnp.ones((2, 3), bool), Groups(1, 3))
  moments_of_no_row = running_moments.measure(
      jnp.full((2, 3), 7.0), jnp.zeros((2, 3), bool), Groups(1, 3))
  merged = running_moments.merge(moments, moments_of_no_row)
  jax.tree.map(assert_array_equal, merged, moments)


def test_moments_of_images_are_those_of_each_pixel_from_0_to_1():
  """Plane by plane they have the bits of all planes at once."""
  rng = np.random.default_rng(2)
  images = rng.integers(0, 256, size=(7, 4, 3, 5, 6)).astype(np.uint8)
  images[..., 0] = 200  # a pixel that never changes
  valid = rng.random((7, 4)) < 0.7
  moments = running_moments.measure(jnp.array(images), valid, Groups(2, 2))
  rows = images[valid] / 255.0
  assert moments.count == len(rows)
  assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-5)
  assert_allclose(moments.m2, rows.var(axis=0) * len(rows), rtol=1e-4, atol=1e-6)
  assert (moments.m2[..., 0] < 1e-9).all()
  whole = running_moments.measure(jnp.float32(images), valid, Groups(2, 2))
  assert_array_equal(moments.mean, whole.mean / np.float32(255))
  assert_array_equal(moments.m2, whole.m2 / np.float32(255**2))
  # Bytes that are no image keep their numbers.
  flat = running_moments.measure(jnp.array(images[:, :, 0, 0]), valid, Groups(2, 2))
  assert_allclose(flat.mean, images[:, :, 0, 0][valid].mean(axis=0), rtol=1e-5)


def merge_all_rows(a, b):
  """Merges moments whose rows all weigh the same."""
  count = a.count + b.count
  delta = b.mean - a.mean
  share = b.count / jnp.maximum(count, 1.0)
  return running_moments.Moments(count, a.mean + delta * share,
                                 a.m2 + b.m2 + jnp.square(delta) * a.count * share)


def test_up_to_the_count_that_float32_has_exactly_all_rows_weigh_the_same():
  rng = np.random.default_rng(1)
  for count in (0.0, 1.0, 64.0, 12345.0, 2.0**23 + 1, 2.0**24):
    for rows in (0.0, 1.0, 40.0, 4096.0):
      a, b = (running_moments.Moments(
          jnp.float32(n), jnp.float32(rng.normal(size=5)),
          jnp.float32(n * rng.random(5))) for n in (count, rows))
      jax.tree.map(assert_array_equal, jax.jit(running_moments.merge)(a, b),
                   jax.jit(merge_all_rows)(a, b))


@pytest.mark.parametrize('rows', [16, 64, 2048])
@pytest.mark.parametrize('count', [2.0**25, 2.0**29, 2.0**34])
def test_moments_of_very_many_rows_still_follow_the_new_ones(rows, count):
  moments = running_moments.Moments(jnp.float32(count), jnp.float32([0.0]), jnp.float32([count]))
  most = max(2.0**24, 2.0**18 * rows)
  updates = int(5 * most / rows)

  def add(i, moments):
    # Squares vary from update to update, as those of real rows do.
    noise = 1.0 + 0.5 * jnp.sin(i.astype(jnp.float32) ** 2)
    return running_moments.merge(moments, running_moments.Moments(
        jnp.float32(rows), jnp.float32([3.0]), jnp.float32([4.0 * rows]) * noise))
  moments = jax.jit(lambda x: jax.lax.fori_loop(0, updates, add, x))(moments)
  assert moments.count >= min(count, most) and moments.count <= most + 2 * rows
  assert_allclose(moments.mean, 3.0, rtol=0.05)
  assert_allclose(running_moments.deviation(moments), 2.0, rtol=0.05)


def test_an_update_without_valid_rows_does_not_make_the_old_ones_weigh_less():
  many = running_moments.Moments(jnp.float32(2.0**30), jnp.ones(2), jnp.ones(2))
  empty = running_moments.initial((2,))
  jax.tree.map(assert_array_equal, running_moments.merge(many, empty), many)


def config(**fields):
  result = small('ppo', 'InvertedPendulum-v4', num_epochs=2, **fields)
  result['normalise'] = {'obs': True, 'reward': True, 'value': True}
  return result


def test_actors_and_learner_normalise_by_the_moments_of_the_updates_before():
  """Then the policy's ratio is 1 before the learner's first gradient step."""
  reports = run(changed(config(), num_minibatches=1, num_epochs=1))[1]
  metrics = [jax.device_get(report.metrics) for report in reports]
  assert all(abs(m['approx_kl'][0]) < 1e-6 for m in metrics)


def watched(config):
  """Runs a config; returns the rollouts that the learner got, and the last train state."""
  rollouts = []

  def watch(call, carry, *batch):
    rollouts.extend(jax.device_get(rollout) for item in batch for rollout in item.value.parts[0])

  state = run(config, tamper=wrap('learner', before=watch))[2]
  return rollouts, state


def test_the_train_state_has_the_moments_of_all_observations_and_returns():
  rollouts, state = watched(config())
  moments = jax.device_get(state.params['moments'])
  obs = np.concatenate([r.obs[:-1][r.valid] for r in rollouts])
  returns = np.concatenate([r.discounted_return[r.valid] for r in rollouts])
  # The counts are exact: gradient steps do not change the moments.
  for name in ('obs', 'returns', 'values'):
    assert moments[name].count == len(obs) == int(state.steps), name
  assert_allclose(moments['obs'].mean, obs.mean(axis=0), rtol=1e-4, atol=1e-5)
  assert_allclose(running_moments.deviation(moments['obs']), obs.std(axis=0), rtol=1e-3)
  assert_allclose(running_moments.deviation(moments['returns']), returns.std(), rtol=1e-3)
  assert moments['values'].mean > 0.1 and 0 < running_moments.deviation(moments['values']) < 10
  # A reward of 1 a step: the discounted return counts from the episode's beginning.
  assert returns.min() == pytest.approx(1.0) and returns.max() > 5


IMAGES = dict(loss='ppo', task='Pong-v5', network='nature_cnn', normalise={
    'obs': True, 'reward': False, 'value': True}, num_epochs=1)


def test_images_are_normalised_pixel_by_pixel():
  """EnvPool's table 8 for Pong: stacks of frames, of which a rollout has each frame once."""
  rollouts, state = watched(small(**IMAGES))
  moments = jax.device_get(state.params['moments']['obs'])
  obs = np.concatenate([jax.device_get(frames.stacks(r.obs))[:-1][r.valid] for r in rollouts])
  assert obs.dtype == np.uint8 and moments.mean.shape == obs.shape[1:] == (4, 21, 21)
  assert moments.count == len(obs) == int(state.steps)
  obs = obs / 255.0
  assert_allclose(moments.mean, obs.mean(axis=0), rtol=1e-4, atol=1e-5)
  assert_allclose(running_moments.deviation(moments), np.sqrt(obs.var(axis=0) + 1e-8), rtol=1e-3,
                  atol=1e-6)
  constant = (obs == obs[0]).all(axis=0)
  assert_array_equal(moments.m2 < 1e-9, constant)  # up to the rounding of the mean
  assert constant.any() and not constant.all()


def test_a_network_gets_images_in_deviations_and_from_0_to_1_before_it_has_any():
  inputs = []
  algorithm = resolve(small(**IMAGES)).algorithm
  params = algorithm.init(jax.random.key(0))
  obs = np.random.default_rng(0).integers(0, 256, size=(1, 5, 4, 21, 21)).astype(np.uint8)

  def watch(next_method, args, kwargs, context):
    if isinstance(context.module, NatureCNN):
      inputs.append(args[0])
    return next_method(*args, **kwargs)

  mean = np.full((4, 21, 21), 0.5, np.float32)
  known = running_moments.Moments(jnp.float32(2.0), mean, np.full_like(mean, 2 * 0.25**2))
  with nn.intercept_methods(watch):
    for moments in (params['moments']['obs'], known):
      changed_params = {**params, 'moments': params['moments'] | {'obs': moments}}
      algorithm.network.apply(changed_params, obs, None, np.ones((1, 5), bool))
  of_first, of_second = (next(x for x in inputs[i:] if len(x) == 5) for i in (0, len(inputs) // 2))
  assert_allclose(of_first, obs[0] / 255.0, rtol=1e-6)
  assert_allclose(of_second, (obs[0] / 255.0 - 0.5) / 0.25, rtol=1e-4, atol=1e-5)


def test_actors_and_learner_normalise_images_by_the_moments_of_the_updates_before():
  reports = run(changed(small(**IMAGES), num_minibatches=1))[1]
  metrics = [jax.device_get(report.metrics) for report in reports]
  assert all(abs(m['approx_kl'][0]) < 1e-6 for m in metrics)


# With a replay.


def test_stacks_of_frames_of_a_replay_are_not_normalised():
  """The replay stores each frame once, so moments of whole stacks are unknown to it."""
  config = changed(small('dqn', 'Pong-v5', 'nature_cnn'), normalise__obs=True, num_minibatches=1)
  with pytest.raises(ValueError, match=r'^normalise\.obs: dqn adds each frame of Pong-v5 to its'):
    resolve(config)
  resolve(changed(config, env__stack_num=1))


def of_replay(loss, **fields):
  """Returns a config whose replay learns from the second update on, with moments if it may."""
  config = small(loss, 'Pendulum-v1' if loss in ('sac', 'td3', 'dpg') else 'CartPole-v1',
                 'deterministic' if loss == 'dpg' else 'mlp', num_shards=2, num_grad_shards=2)
  config['num_minibatches'] = 1
  config['replay'] |= dict(capacity=256, min_size=64, batch_size=32, gradient_steps=3)
  if loss == 'r2d2':
    config['network'] |= dict(core='gru', core_size=8)
    config['loss'] |= dict(burn_in=2, trace_length=6, n_step=2)
    config['replay'] |= dict(capacity=32, min_size=16, batch_size=16)  # sequences
  return changed(config, normalise__obs=loss == 'dqn', **fields)


def test_each_row_that_is_added_to_a_replay_counts_once():
  """Rows do not count as often as they are drawn, and those after an episode do not count."""
  rollouts, state = watched(of_replay('dqn'))
  obs = np.concatenate([r.obs[:-1][r.valid] for r in rollouts])
  moments = state.params['moments']['obs']
  assert moments.count == len(obs) < 6 * 64
  assert_allclose(moments.mean, obs.mean(axis=0), rtol=1e-4, atol=1e-5)
  assert_allclose(running_moments.deviation(moments), obs.std(axis=0), rtol=1e-4)
  jax.tree.map(assert_array_equal, state.target.params['moments'], state.params['moments'])


MOMENTS = dict(CartPole=([0.1, -0.2, 0.3, 0.5], [0.5, 2.0, 0.3, 1.5]),
               Pendulum=([0.1, -0.2, 0.5], [0.5, 2.0, 3.0]))


@pytest.mark.parametrize('loss', ['dqn'])
def test_losses_and_actions_are_those_of_standardised_observations(loss):
  config = of_replay(loss)
  if loss in ('sac', 'td3'):
    config['replay']['min_size'] = 0
  algorithm, plain = (resolve(x).algorithm for x in (config, changed(config, normalise__obs=False)))
  of_task = MOMENTS[config['env']['task'].partition('-')[0]]
  mean, deviation = map(np.float32, of_task)
  moments = running_moments.Moments(jnp.float32(100), mean, 100 * deviation ** 2)
  plain_state = plain.first_state(jax.random.key(0), jax.random.key(1))
  target = jax.tree.map(lambda x: 0.9 * x + 0.05, plain_state.target.params)
  plain_state = plain_state.with_target(target)
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  of_target = running_moments.with_moments_of(target, state.target.params)
  state = state._replace(params=dict(state.params, moments={'obs': moments})).with_target(
      dict(of_target, moments={'obs': moments}) if 'moments' in of_target else of_target)

  rng = np.random.default_rng(0)
  def raw(*shape):
    return np.float32(mean + deviation * rng.normal(size=(*shape, len(mean))))
  def seen(x):
    return (x - mean) / deviation
  action = (rng.uniform(-1, 1, (8, 1)).astype(np.float32) if loss in ('sac', 'td3')
            else rng.integers(0, 2, 8, np.int32))
  number = np.float32(rng.normal(size=8))
  if loss == 'r2d2':
    false = np.zeros((9, 8), bool)
    items = Rollout(raw(10, 8), np.tile(action, (9, 1)), None, np.tile(number, (9, 1)), false,
                    false, ~false, None, carry=np.zeros((1, 8, 8), np.float32))
    standard = items._replace(obs=seen(items.obs))
  else:
    items = Transition(raw(8), action, number, np.full(8, 0.9, np.float32), raw(8))
    standard = items._replace(obs=seen(items.obs), next_obs=seen(items.next_obs))
  batch = Batch(items, None, np.ones(8, np.float32), np.float32(8), None)
  key = jax.random.key(2)
  grads, aux = algorithm.gradient(state, batch, key)
  expected_grads, expected = plain.gradient(plain_state, batch._replace(items=standard), key)
  assert_allclose(aux.priority, expected.priority, rtol=1e-3, atol=1e-5)
  moment_grads = grads.pop('moments')
  assert not any(map(np.any, jax.tree.leaves(moment_grads)))
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-3, atol=1e-4), grads, expected_grads)

  obs = raw(8)
  valid = np.ones(8, bool)
  acted, expected = (x.act(x.acting(y), z, x.initial_carry(8), valid, None, None)
                     for x, y, z in ((algorithm, state, obs), (plain, plain_state, seen(obs))))
  assert_allclose(acted.distribution, expected.distribution, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('loss', ['dqn'])
@pytest.mark.same_bits('one program (`fused`) and several (`sync`), 2 devices and 1',
                       'DQN with normalised observations')
def test_moments_of_a_replay_are_the_same_in_one_program_and_on_two_devices(loss):
  config = of_replay(loss)
  of_sync, _, state = run(config)
  assert len({params for _, params in of_sync}) == len(of_sync)
  assert state.params['moments']['obs'].count > 6 * 50
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync


@pytest.mark.full
def test_moments_of_a_replay_that_is_filled_at_a_free_rate_have_all_its_rows():
  """Each device of the learner gets all rollouts, and has the replay of its own groups."""
  config = of_replay('dqn', scheme='apex', placement__actor_devices=(0, 0),
                     placement__learner_devices=(1, 2), env__renew_every_updates=0)
  _, reports, state = run(config, updates=12)
  added = sum(int(jax.device_get(report.metrics['valid'])[0]) for report in reports)
  assert state.params['moments']['obs'].count == added > 64
