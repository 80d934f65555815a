"""Schemes that must agree give the same bits; the scripts that search for differences work."""

import re

import jax
import pytest

from benchmarks import agreement, fuzz_bits
from podracer_jit import losses
from podracer_jit.losses.ppo import PPO
from podracer_jit.numerics import islands
from podracer_jit.schemes.table import SCHEMES
from tests import extras
from tests.runs import changed, small
from tests.tiers import essential

# Episodes end within the four updates.
SMALL_FRAMES = {'img_height': 21, 'img_width': 21, 'max_episode_steps': 10, 'noop_max': 4}


def _smaller(config):
  """Returns a shipped config with smaller sizes and the same parts."""
  for name in ('num_grad_shards', 'num_minibatches', 'num_epochs'):
    config[name] = min(config[name], 2)
  config['env']['num_envs'] = 8
  config['unroll_length'] = min(config['unroll_length'], 8)
  if 'replay' in config:
    # The second update learns at the latest, and the last one evicts.
    config['replay'] |= dict(capacity=96, min_size=32, batch_size=32, gradient_steps=2)
  if 'burn_in' in config['loss']:
    # Sequences of two rollouts.
    config['loss'] |= dict(burn_in=4, trace_length=4)
    config['replay'] |= dict(capacity=8, min_size=8, batch_size=8)
  if 'channels' in config['network'] and config['env']['task'].endswith('-v5'):
    config['env'] |= SMALL_FRAMES
    config['unroll_length'] = 4
    config['network'] |= dict(channels=(8,) * len(config['network']['channels']), hidden=32)
    if 'strides' in config['network']:
      config['network'] |= dict(kernels=(4, 3, 3), strides=(2, 2, 1))
  return config


@pytest.mark.parametrize('name', essential(agreement.shipped(), 'apex_dqn_catch'))
@pytest.mark.same_bits('one program for G and U, and G and U apart; with a replay other schemes',
                       'all shipped configs, at smaller sizes')
def test_shipped_configs_agree(name):
  """Compares one program for G and U on one device with the variant that differs most from it."""
  extras.skip_without(name)
  config = _smaller(agreement.shipped_config(name))
  first, *variants = agreement.variants(config, 0)
  second = next((variant for variant in variants if variant.scheme == 'dppo'), variants[-1])
  run_a, run_b = (agreement.run(config, way, 4) for way in (first, second))
  params = [params for _, params in run_a.receipts]
  assert len(set(params)) >= 3, 'a replay of this size learns too late'
  difference = agreement.disagreement(config, (first, second), run_a, run_b)
  assert not difference, f'{first} and {second} {difference}'


# Half of the first twenty experiments, without those with images, which take long to compile.
@pytest.mark.parametrize('number', essential([1, 5, 6, 8, 9, 10, 14, 17, 18, 19], 18))
@pytest.mark.same_bits('schemes and placements drawn at random', 'ten experiments drawn at random')
def test_experiments_drawn_at_random_agree(number):
  assert not fuzz_bits.disagreement(fuzz_bits.draw(number), number, 20)


def test_experiments_of_every_algorithm_are_drawn_and_soon_learn():
  drawn = [fuzz_bits.draw(number) for number in range(1, 41)]
  assert {config['loss']['name'] for config in drawn} == losses.ALGORITHMS.keys()
  with_a_replay = [config for config in drawn if 'replay' in config]
  assert all(agreement.fewest_updates(config, 20) < 20 for config in with_a_replay)


def test_an_experiment_is_drawn_from_its_number():
  assert fuzz_bits.draw(3) == fuzz_bits.draw(3) != fuzz_bits.draw(4)


@pytest.mark.parametrize('loss', ['ppo', 'dqn'])
def test_variants_have_every_deterministic_scheme(loss):
  config = agreement.shipped_config('ppo_cartpole' if loss == 'ppo' else 'apex_dqn_catch')
  schemes = {variant.scheme for lag in (0, 1) for variant in agreement.variants(config, lag)}
  # `Scheme.replay` is True or False if a scheme needs or refuses a replay, else None.
  refused = loss == 'ppo'
  assert schemes == {name for name, scheme in SCHEMES.items()
                     if scheme.deterministic and scheme.replay is not refused}


@pytest.mark.parametrize('name, updates, fewest', [
    ('ppo_cartpole', 100, 10),
    ('ppo_cartpole', 5, 1),
    ('apex_dqn_atari', 100, 10),  # 18,000 rows an update; it learns from 50,000
    ('apex_dpg_dmc', 100, 20),  # 3,200 rows an update; it learns from 50,000
    ('apex_dpg_dmc', 15, 15)])
def test_slow_configs_make_a_few_updates_that_learn(name, updates, fewest):
  assert agreement.fewest_updates(agreement.shipped_config(name), updates) == fewest


@pytest.mark.full
@pytest.mark.as_shipped
def test_without_islands_the_search_finds_a_difference(monkeypatch):
  config = small('ppo', num_shards=4, num_grad_shards=4)
  first, *variants = agreement.variants(config, 0)
  second = next(variant for variant in variants if variant.scheme == 'ddppo')
  monkeypatch.setattr(islands, '_in_a_branch', lambda function, skipped, *args: function(*args))
  monkeypatch.setattr(islands.lax, 'optimization_barrier', lambda args: args)
  jax.clear_caches()
  (_, difference), = agreement.disagreements(config, [first, second], 6)
  jax.clear_caches()
  assert re.match(r'differ at update \d \(parameters\); ', difference)


@pytest.mark.full
def test_the_search_names_the_island_that_differs(monkeypatch):
  """One island computes something else with two learner devices; others follow from it."""
  config = small('ppo', num_shards=2, num_grad_shards=2)
  first, *variants = agreement.variants(config, 0)
  second = next(variant for variant in variants if variant.scheme == 'ddppo')
  real_run = agreement.run
  real_targets = PPO.targets

  def run(config, variant, updates):
    factor = 1.000001 if variant == second else 1.0
    monkeypatch.setattr(PPO, 'targets', lambda *args: jax.tree.map(
        lambda x: x * factor, real_targets(*args)))
    return real_run(config, variant, updates)

  monkeypatch.setattr(agreement, 'run', run)
  (_, difference), = agreement.disagreements(config, [first, second], 3)
  assert difference.endswith('different results: islands targets')


def test_a_difference_is_reduced_to_a_small_experiment(monkeypatch):
  """The made-up difference needs several epochs and a recurrent core, and nothing else."""
  config = changed(small('ppo', num_epochs=3, num_shards=2), network__core='gru',
                   normalise__obs=True, optimizer__anneal=True)
  config.setdefault('microbatch_rows', 0)

  def disagreement(config, number, updates):
    differs = config['num_epochs'] > 1 and config['network']['core'] == 'gru'
    return f'differ with {config["unroll_length"]} rows' if differs else ''

  monkeypatch.setattr(fuzz_bits, 'disagreement', disagreement)
  smallest, difference = fuzz_bits.shrink(config, 1, disagreement(config, 1, 60), 60)
  assert smallest['num_epochs'] == 3 and smallest['network']['core'] == 'gru'
  assert not smallest['normalise']['obs'] and not smallest['optimizer']['anneal']
  assert (smallest['num_shards'], smallest['env']['num_envs']) == (1, 1)
  assert difference == 'differ with 2 rows'
