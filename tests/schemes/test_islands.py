"""The islands of an experiment have the same compiled bodies in the programs of all schemes."""

import collections

import jax
import pytest

from benchmarks.compiled import islands, recorded
from tests.runs import changed, fresh, run, small
from tests.schemes import test_apex
from tests.tiers import essential

pytestmark = [pytest.mark.implementation, pytest.mark.as_shipped]

TWO = dict(num_shards=2, num_grad_shards=2)
SPLIT = dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1))


def recurrent_ppo():
  """PPO with a recurrent core and all normalisers, on continuous actions."""
  config = small('ppo', 'InvertedPendulum-v4', num_epochs=2, **TWO)
  config['network'] |= {'core': 'gru', 'core_size': 8}
  config['normalise'] = {'obs': True, 'reward': True, 'value': True}
  return config


CASES = {
    'ppo': (recurrent_ppo, {
        'one device': {}, 'two devices': SPLIT,
        'fused': dict(scheme='fused', placement__updates_per_call=4),
        'central': dict(scheme='dppo', **SPLIT)},
        {'decision', 'discounted_returns', 'sum_of_rows', 'mean_of_rows', 'squares_of_rows',
         'scaled_rewards', 'targets', 'batch_statistics', 'gradient', 'update', 'merged_moments',
         'metrics'}),
    'impala': (lambda: small('impala', 'Pong-v5', 'impala_resnet', **TWO), {
        'one device': {}, 'two devices': SPLIT,
        'fused': dict(scheme='fused', placement__updates_per_call=4),
        'central': dict(scheme='rapid', placement__actor_devices=(0, 1),
                        placement__learner_devices=(2, 3))},
        {'decision', 'gradient', 'update', 'metrics'}),
    'dqn': (lambda: test_apex.config('dqn', replay__batch_size=16), {
        'one device': {}, 'two devices': SPLIT,
        'fused': dict(scheme='fused', placement__updates_per_call=4)},
        {'decision', 'initial_priorities', 'priorities', 'strata', 'probability',
         'n_step_return', 'importance_weights', 'gradient', 'sampled_age', 'update', 'metrics'}),
}


@pytest.mark.parametrize('case', essential(CASES, 'dqn'))
@pytest.mark.same_bits('compiled bodies of all islands: one device, two, `fused`, G and U apart',
                       'IMPALA: ResNet, PPO: GRU with running moments, DQN: MLP')
def test_the_islands_of_all_programs_have_equal_bodies(case):
  make, places, expected = CASES[case]
  bodies = {}
  for place, fields in places.items():
    config = changed(make(), **fields)
    jax.clear_caches()
    with recorded() as texts:
      run(None, updates=2, prepared_run=fresh(config))
    bodies[place] = collections.defaultdict(set)
    for text in texts:
      for name, variants in islands(text).items():
        bodies[place][name] |= variants
  first, *other_places = bodies
  assert set(bodies[first]) == expected
  for place in other_places:
    assert set(bodies[place]) == expected
    different = [name for name in expected if bodies[place][name] != bodies[first][name]]
    assert not different, f'{first} and {place}: {different}'
