"""Schedules: their values, their notation, and a training with one."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from podracer_jit import options, schedules
from podracer_jit.agents import optimizers
from podracer_jit.experiment.resolve import resolve
from podracer_jit.schedules import Schedule, parse
from tests.runs import changed, run, small

LONG = 5_700_000_000  # more steps than 32 bits can count


@pytest.mark.parametrize('text, values', [
    ('linear:0.1:0', {0: 0.1, 0.25: 0.075, 1: 0, 1.5: 0}),
    ('linear:0:2', {0: 0, 0.25: 0.5, 1: 2, 1.5: 2}),
    ('linear:1:0.05:0.1', {0: 1, 0.05: 0.525, 0.1: 0.05, 0.7: 0.05}),
    ('linear:1:0.5:250steps', {0: 1, 0.125: 0.75, 0.25: 0.5, 1: 0.5}),
    ('linear:-1:1', {0: -1, 0.5: 0, 1: 1}),
    ('cosine:0.2:0', {0: 0.2, 0.25: 0.1 * (1 + math.sqrt(0.5)), 0.5: 0.1, 1: 0, 2: 0}),
    ('cosine:0:1', {0: 0, 0.5: 0.5, 1: 1}),
    ('cosine:1:0.5:1_000steps', {0: 1, 0.5: 0.75, 1: 0.5}),
    ('piecewise:0.1:0.5=0.05:0.8=0.01', {0: 0.1, 0.499: 0.1, 0.5: 0.05, 0.799: 0.05, 0.8: 0.01,
                                         2: 0.01}),
    ('piecewise:0.1:200steps=0.05', {0: 0.1, 0.199: 0.1, 0.2: 0.05, 1: 0.05})])
def test_values_at_shares_of_a_thousand_steps(text, values):
  at = jax.jit(lambda steps: parse(text).at(steps, 1000))
  outputs = [at(jnp.float32(1000 * share)) for share in values]
  assert_allclose(outputs, list(values.values()), rtol=1e-6, atol=1e-7)
  assert {(x.shape, x.dtype, x.weak_type) for x in outputs} == {((), np.dtype(np.float32), False)}


@pytest.mark.parametrize('text', ['linear:1:0', 'cosine:1:0', 'piecewise:1:0.5=0.5'])
def test_total_steps_may_need_more_than_32_bits(text):
  schedule = parse(text)
  assert_allclose(schedule.at(jnp.float32(LONG // 2), LONG), 0.5, rtol=1e-6)


@pytest.mark.parametrize('start', [0.5, 2.5e-4, 6e-4, 1e-3])
@pytest.mark.parametrize('total', [1, 7, 3456, 50_000_000, 2**31 - 1])
def test_an_annealed_rate_has_the_bits_that_it_had_before_there_were_schedules(start, total):
  rates = [lambda x: start * jnp.maximum(0.0, 1.0 - x.astype(jnp.float32) / total),
           optimizers.Adam(learning_rate=start, anneal=True).schedule(total)]
  rng = np.random.default_rng(0)
  steps = jnp.int32([0, 1, total, *rng.integers(0, total, 1000, endpoint=True)])
  before, now = (np.asarray(jax.jit(jax.vmap(rate))(steps)).view(np.int32) for rate in rates)
  np.testing.assert_array_equal(before, now)
  # How the compiler rounds depends on the operations around, so all of them must be the same.
  before, now = (jax.jit(rate).lower(steps[0]).as_text() for rate in rates)
  assert before == now


def test_rounding_stays_within_the_values():
  """For example b2 = 0.99999994, the largest below 1, must not become 1."""
  rng = np.random.default_rng(0)
  steps = jnp.float32([0, 1, 2, 999, 1000, *rng.uniform(0, 1000, 50)])
  for first, last, kind in itertools.product(
      (0.99999994, 0.9, 1 / 3), (0.1, 1 / 7, 0.7), ('linear', 'cosine')):
    schedule = Schedule(kind, (first, last), (1.0,))
    values = jax.jit(jax.vmap(lambda x, schedule=schedule: schedule.at(x, 1000)))(steps)
    assert values.max() <= np.float32(max(first, last)), schedule
    assert values.min() >= np.float32(min(first, last)), schedule


@pytest.mark.parametrize('text, short', [
    ('linear:0.1:0', ''), ('linear:1:0:1', 'linear:1:0'), ('linear:1:0:1steps', ''),
    ('linear:1.0:5e-2:1_000steps', 'linear:1:0.05:1000steps'), ('cosine:1e-05:-1e+22:0.25', ''),
    ('piecewise:0.1:0.50=0.05:.8=.01', 'piecewise:0.1:0.5=0.05:0.8=0.01'),
    ('piecewise:1:1e6steps=2', 'piecewise:1:1000000steps=2')])
def test_a_schedule_is_its_notation(text, short):
  schedule = parse(text)
  assert str(schedule) == (short or text)
  assert parse(str(schedule)) == schedule
  assert hash(parse(str(schedule))) == hash(schedule)
  assert all(isinstance(x, float) for x in schedule.values + schedule.lengths)


def test_a_share_and_a_step_differ():
  assert parse('linear:1:0:1') != parse('linear:1:0:1steps')


@pytest.mark.parametrize('text, message', [
    ('fast', 'must be a number, or a schedule .linear, cosine, piecewise. such as linear:0.1:0$'),
    ('linaer:1:0', '^must be a number, or a schedule'),
    ('linear', '^must be a number, or a schedule'),
    ('linear:1', 'linear needs the first and the last number, .* such as linear:1:0.05 or'),
    ('cosine:1:0:0.5:3', 'cosine needs .* at most one length, such as cosine:1:0.05 or'),
    ('linear:a:0', "'a' must be a number, as in linear:0.1:0"),
    ('linear:inf:0', "'inf' must be a number"), ('cosine:1:nan', "'nan' must be a number"),
    (f'linear:{"9" * 400}:0', "^'99999999999999999999' must be a number"),
    ('linear:1:0:0', "'0' must be a share of total_steps, above 0 and at most 1, or steps"),
    ('linear:1:0:1.5', "'1.5' must be a share"), ('linear:1:0:', "'' must be a share"),
    ('linear:1:0:0.5steps', "'0.5steps' must be a whole number of steps, such as 100000steps"),
    ('linear:1:0:1e300steps', 'must be a whole number of steps'),
    ('piecewise:1', 'piecewise needs a number, and then .* such as piecewise:0.1:0.5=0.05'),
    ('piecewise:1:0.5', 'piecewise needs'), ('piecewise:1:0.5=1=2', "'1=2' must be a number"),
    ('piecewise:1:0.5=1:0.5=2', 'must be in order, such as'),
    ('piecewise:1:9steps=1:5steps=2', 'must be in order'),
    ('piecewise:1:0.5=1:5steps=2', 'shares of total_steps or steps, not both, such as')])
def test_a_wrong_text_is_refused_with_a_right_one(text, message):
  with pytest.raises(ValueError, match=message):
    parse(text)


@dataclasses.dataclass(frozen=True)
class Part:
  """A part with options."""

  share: float = options.option(0.5, 'a share', at_least=0, at_most=1)
  rate: float = options.option(1.0, 'a rate', above=0, message='must be positive')
  fixed: float = options.option(0.0, 'a constant', constant=True)
  count: int = options.option(3, 'a count')
  on: bool = options.option(False, 'a switch')
  kind: str = options.option('a', 'any text')


def test_a_part_has_its_values_at_a_step():
  part = Part()
  assert schedules.scheduled(part) == {} and schedules.at(part, jnp.float32(1), 10) is part
  part = options.make(Part, options.defaults(Part) | dict(share='linear:1:0', count=4))
  assert schedules.scheduled(part) == {'share': parse('linear:1:0')}
  assert hash(part) == hash(dataclasses.replace(part, share=parse('linear:1.0:0:1')))
  assert jax.jit(lambda steps: schedules.at(part, steps, 10).share)(jnp.float32(4)) == (
      np.float32(0.6))
  assert schedules.at(part, jnp.float32(4), 10).count == 4


@pytest.mark.parametrize('values, message', [
    (dict(share='linear:1:0', kind='linear:1:0'), ''),
    (dict(share='linear:1:2'), "share: its number 2 must be between 0 and 1, got 'linear:1:2'"),
    (dict(share='piecewise:-1:0.5=2'), 'share: its number -1 must be between 0 and 1, got'),
    (dict(rate='linear:1:0'), "rate: its number 0 must be positive, got 'linear:1:0'"),
    (dict(rate='linear:1'), 'rate: linear needs the first and the last number'),
    (dict(rate='fast'), 'rate: must be a number, or a schedule'),
    (dict(fixed='linear:1:0'),
     "fixed: must be a number; it cannot change during a run, got 'linear:1:0'"),
    (dict(count='linear:1:5'), 'count: must be a whole number; only fractional numbers of loss '
     "and optimizer may change during a run, got 'linear:1:5'"),
    (dict(on='linear:1:0'), 'on: must be True or False; only fractional numbers of loss')])
def test_all_numbers_of_a_schedule_obey_the_limits(values, message):
  problems = list(options.check_values('part.', values, Part, may_change=True))
  assert len(problems) == bool(message)
  assert all(line.startswith(f'part.{message}') for line in problems), problems


def test_options_of_other_sections_do_not_change():
  assert list(options.check_values('part.', dict(share='linear:1:0'), Part)) == [
      'part.share: must be a number; only fractional numbers of loss and optimizer may change '
      "during a run, got 'linear:1:0'"]


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_every_option_of_an_optimizer_may_change(name):
  """With options that are half of their values at half of the run, as with constant halves."""
  part = optimizers.OPTIMIZERS[name]
  names = {name for name, value in options.defaults(part).items()
           if isinstance(value, float) and not options.meanings(part)[name].constant}
  assert {'learning_rate', 'max_grad_norm', 'eps'} < names
  numbers = {name: options.defaults(part)[name] for name in names}
  constant = part(anneal=False, **numbers)
  changing = part(anneal=False, **{name: Schedule('linear', (value * 2 / 3, value * 4 / 3), (1.0,))
                                   for name, value in numbers.items()})
  params = {'w': jnp.float32([1, -2, 3])}
  state = schedules.at(changing, jnp.float32(0), 100).transformation().init(params)

  @jax.jit
  def updated(grads, state, steps):
    optimizer = schedules.at(changing, steps, 100)
    change, state = optimizer.transformation().update(grads, state, params)
    return optax.tree.scale(optimizer.learning_rate, change), state

  transformation = constant.transformation()
  expected_state = transformation.init(params)
  for grads in ([3, -0.02, 70], [-1, 0.5, 0.1]):
    grads = {'w': jnp.float32(grads)}
    change, state = updated(grads, state, jnp.float32(50))
    expected, expected_state = transformation.update(grads, expected_state, params)
    assert_allclose(change['w'], constant.learning_rate * expected['w'], rtol=1e-4)


@pytest.mark.parametrize('fields, message', [
    (dict(anneal=False, learning_rate='linear:0:0.1:0.1'), ''),
    (dict(learning_rate='cosine:0.1:0'),
     'optimizer.anneal: the learning_rate changes by cosine:0.1:0; set optimizer.anneal = False'),
    (dict(anneal=False, learning_rate='cosine:0.1:-1'),
     'optimizer.learning_rate: its number -1 must be at least 0, got'),
    (dict(anneal=False, learning_rate='linear:0:0'),
     'optimizer.learning_rate: must be above 0, got linear:0:0'),
    (dict(learning_rate=0.0), 'optimizer.learning_rate: must be above 0, got 0.0'),
    (dict(learning_rate=1e-60), 'optimizer.learning_rate: must be above 0, got 1e-60'),
    (dict(anneal=False, learning_rate='linear:0.01:0', kl_target=0.1),
     'optimizer.kl_target: the rate either adapts or changes by linear:0.01:0; must be 0, or '
     'optimizer.learning_rate a number'),
    (dict(kl_target='linear:1:0'), 'optimizer.kl_target: must be a number; it cannot change')])
def test_combinations_of_an_optimizers_options(fields, message):
  config = small('ppo', num_epochs=1)
  config['optimizer'] |= fields
  if not message:
    assert resolve(config).optimizer.learning_rate == parse('linear:0:0.1:0.1')
    return
  with pytest.raises(ValueError) as error:
    resolve(config)
  assert str(error.value).startswith(message)


def test_a_training_has_the_rate_of_a_schedule():
  config = changed(small(), total_steps=400, optimizer__learning_rate='cosine:0.01:0.002',
                   optimizer__anneal=False)
  _, reports, _ = run(config)
  steps = np.concatenate([report.metrics['steps'] for report in reports])
  rates = np.concatenate([report.metrics['learning_rate'] for report in reports])
  share = np.minimum(np.array([0, *steps[:-1]]) / 400, 1)
  assert_allclose(rates, 0.002 + 0.004 * (1 + np.cos(np.pi * share)), rtol=1e-5)
  assert len(rates) == 6 and rates[0] == np.float32(0.01) and (np.diff(rates) < 0).all()
