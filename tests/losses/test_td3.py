"""TD3 compared with plain NumPy, and with what it must hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit import losses, testing
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner import updates
from podracer_jit.losses.td3 import TD3
from podracer_jit.numerics import counters
from tests.losses import off_policy
from tests.losses.off_policy import N, mlp
from tests.runs import changed, run

config_of = functools.partial(off_policy.config_of, 'td3')


def _case(**fields):
  """Returns an algorithm, a state whose targets differ, a batch, and the key of its loss."""
  algorithm = resolve(config_of(**fields)).algorithm.at(counters.zero(1000))
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  state = state.with_target(jax.tree.map(lambda p: 1.5 * p + 0.1, state.target.params))
  return algorithm, state, off_policy.batch(), jax.random.key(2)


def _act(params, obs):
  return np.tanh(mlp(jax.tree.map(np.float64, params), obs))


def _losses(params, state, batch, key):
  """Returns the losses of critics and actor, the errors, and the first values, in 64 bits.

  They are those of algorithm 1.

  Args:
    params: to differentiate; the actor's loss has the critics of `state`.
    state: its targets count.
    batch: the transitions.
    key: of the noise, which has a deviation of 0.6 and is clipped at 0.4.
  """
  x = batch.items
  draw = 0.6 * np.float64(jax.random.normal(key, (N, 1)))
  target = state.target.params
  noisy = _act(target['actor'], x.next_obs) + draw.clip(-0.4, 0.4)
  # Otherwise the test would not see these bounds.
  assert 0 < np.sum(np.abs(draw) > 0.4) < N and 0 < np.sum(np.abs(noisy) > 1) < N
  value = off_policy.q(target['critic'], x.next_obs, noisy.clip(-1, 1)).min(0)
  q = off_policy.q(params['critic'], x.obs, x.action)
  error = q - (x.reward + x.discount * value)
  first = off_policy.q(state.params['critic'], x.obs, _act(params['actor'], x.obs))[0]
  return 0.5 * np.square(error).sum(0), -first, error, q[0]


NOISY = dict(loss__target_noise=0.6, loss__target_noise_clip=0.4)


def test_the_loss_is_that_of_the_paper():
  algorithm, state, batch, key = _case(**NOISY)
  loss, aux = jax.jit(algorithm.loss)(state.params, state, batch, key)
  critic_loss, _, error, q = _losses(state.params, state, batch, key)
  assert_allclose(aux.terms['critic_loss'], critic_loss.sum(), rtol=1e-4)
  assert_allclose(aux.terms['q'], q.sum(), rtol=1e-4)
  assert_allclose(loss, (batch.weight * critic_loss).sum() / N, rtol=1e-4)
  assert_allclose(aux.priority, np.abs(error).max(0), rtol=1e-4)


@pytest.mark.parametrize('part', ['actor', 'critic'])
def test_the_gradient_has_the_slopes_of_the_losses(part):
  algorithm, state, batch, key = _case(**NOISY)
  # The next step is the second one, which is also the actor's.
  state = state._replace(target=state.target._replace(gradient_steps=jnp.int32(1)))
  grads, _ = jax.jit(algorithm.gradient)(state, batch, key)
  rng = np.random.default_rng(4)
  for _ in range(5):
    direction = jax.tree.map(lambda p: rng.normal(size=p.shape), state.params[part])

    def loss(step, direction=direction):
      moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, state.params[part], direction)
      critic_loss, actor_loss, _, _ = _losses({**state.params, part: moved}, state, batch, key)
      return (batch.weight * (critic_loss + actor_loss)).sum() / N

    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, grads[part], direction)))
    assert abs(slope) > 1e-2
    assert_allclose(slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-3)


class Cloning(TD3):
  """Has a term of the actor in its loss, as TD3+BC (2106.06860)."""

  def loss(self, params, state, batch, key):
    loss, aux = super().loss(params, state, batch, key)
    return loss + self.cloning(params['actor'], batch), aux

  def cloning(self, actor, batch):
    action = self.network.apply(actor, batch.items.obs)
    return jnp.sum(jnp.square(action - batch.items.action)) / batch.count


@pytest.mark.parametrize('done', [0, 1])  # the actor's step is due after 1
def test_the_loss_of_a_subclass_may_have_terms_of_the_actor(done):
  algorithm, state, batch, key = _case()
  state = state._replace(target=state.target._replace(gradient_steps=jnp.int32(done)))
  cloning = Cloning(**{field.name: getattr(algorithm, field.name)
                       for field in dataclasses.fields(algorithm)})
  own = jax.grad(cloning.cloning)(state.params['actor'], batch)
  before, after = (jax.jit(each.gradient)(state, batch, key)[0] for each in (algorithm, cloning))
  assert any(map(np.any, jax.tree.leaves(before['actor']))) == done
  jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-6), after['actor'],
               jax.tree.map(jnp.add, before['actor'], own))


def _equal(a, b):
  a, b = map(jax.tree.leaves, (a, b))
  return [x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize('delay, done', [(1, 0), (3, 0), (3, 1)])
def test_actor_moments_and_targets_change_at_delayed_steps_only(delay, done):
  """The count of gradient steps says when; an optimizer of another run may have done others."""
  algorithm, state, batch, key = _case(loss__policy_delay=delay, loss__tau=0.25,
                                       optimizer__learning_rate=0.01)
  state = state._replace(target=state.target._replace(gradient_steps=jnp.int32(done)))
  step = jax.jit(updates.make_update(algorithm))
  for number in range(done + 1, done + 8):
    grads, aux = jax.jit(algorithm.gradient)(state, batch, jax.random.fold_in(key, number))
    assert all(np.any(g) for g in jax.tree.leaves(grads['critic']))
    is_due = number % delay == 0
    assert [np.any(g) for g in jax.tree.leaves(grads['actor'])] == [is_due] * len(
        jax.tree.leaves(grads['actor']))
    after, _ = step(state, grads, aux._replace(priority=None))
    assert after.target.gradient_steps == number

    of_part, before = (s.opt_state.inner_states for s in (after, state))
    assert not any(_equal(after.params['critic'], state.params['critic']))
    assert not any(_equal(of_part['critic'], before['critic']))
    delayed = ((after.params['actor'], state.params['actor']), (of_part['actor'], before['actor']),
               (after.target.params['actor'], state.target.params['actor']),
               (after.target.params['critic'], state.target.params['critic']))
    for new, old in delayed:
      assert not any(_equal(new, old)) if is_due else all(_equal(new, old))
    if is_due:
      jax.tree.map(
          lambda new, online, old: assert_allclose(new, 0.25 * online + 0.75 * old, rtol=1e-5,
                                                   atol=1e-7),
          after.target.params, after.params, state.target.params)
    state = after


def test_the_actors_step_is_adams_of_the_delayed_gradients():
  """With a delay of two, four steps equal two steps of Adam on the second and fourth gradient."""
  algorithm, state, batch, key = _case(loss__policy_delay=2, optimizer__learning_rate=0.01)
  actor = {'actor': state.params['actor']}
  adam = algorithm.parts.optimizer.transformation()
  moments = adam.init(actor)
  for number in range(1, 5):
    grads, aux = algorithm.gradient(state, batch, jax.random.fold_in(key, number))
    if number % 2 == 0:
      change, moments = adam.update({'actor': grads['actor']}, moments)
      actor = jax.tree.map(lambda p, c: p - 0.01 * c, actor, change)
    state = algorithm.update(state, grads, aux)
    state = state._replace(target=state.target._replace(gradient_steps=np.int32(number)))
  jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params['actor'],
               actor['actor'])


def test_actions_are_uniform_at_first_then_noisy_and_plain_in_evaluations():
  algorithm = resolve(config_of(loss__noise=0.2)).algorithm
  state = algorithm.first_state(jax.random.key(0), jax.random.key(1))
  obs = np.tile(np.float32([1.0, 0.2, -0.5]), (4000, 1))
  valid = np.ones(4000, bool)
  key = jax.random.key(3)

  def act(steps, key, exploration, shift=0.0):
    head = state.params['actor']['params']['Dense_0']
    shifted = {**state.params['actor']['params'], 'Dense_0': head | {'bias': head['bias'] + shift}}
    params = {**state.params, 'actor': {'params': shifted}}
    params = algorithm.acting(state._replace(params=params, steps=state.steps + steps))
    return np.array(algorithm.act(params, obs, None, valid, key, exploration).action)[:, 0]

  plain = act(0, None, None)
  assert_allclose(plain, _act(state.params['actor'], obs[:1])[0, 0], rtol=1e-5)
  assert_array_equal(plain, act(64, key, None))
  explores = algorithm.exploration(4000)
  assert_allclose(np.quantile(act(63, key, explores), [0.1, 0.5, 0.9]), [-0.8, 0, 0.8], atol=0.06)
  noise = act(64, key, explores) - plain
  assert abs(plain[0]) < 0.3  # so that few sums reach a bound
  assert_allclose(np.quantile(noise, [0.159, 0.5, 0.841]), [-0.2, 0, 0.2], atol=0.02)
  near_bound = act(64, key, explores, shift=2.0)
  assert near_bound.max() == 1.0 and 0.1 < np.mean(near_bound == 1.0) < 0.9


def test_discrete_actions_are_refused():
  with pytest.raises(ValueError, match='loss.name: td3 wants continuous actions; those of Cart'):
    resolve(changed(config_of(), env__task='CartPole-v1'))


def test_it_holds_what_an_algorithm_must_hold():
  assert testing.check(losses.TD3, config_of())


def test_a_run_is_the_same_in_one_program_and_on_two_devices():
  config = config_of(num_grad_shards=2, num_shards=2)
  of_sync = run(config)[0]
  assert len({params for _, params in of_sync}) > 3
  assert run(changed(config, scheme='fused', placement__actor_devices=(0,),
                     placement__learner_devices=(0,)))[0] == of_sync
  assert run(changed(config, placement__actor_devices=(0, 1),
                     placement__learner_devices=(0, 1)))[0] == of_sync
