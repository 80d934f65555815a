"""Agents learn: real configs, three seeds each, thresholds that a broken agent misses.

Random play: Catch -0.6 of 1, CartPole 22 of 500.
"""

import collections
import functools

import jax
import pytest

from podracer_jit import build, loops
from podracer_jit.configs import impala_cartpole, impala_catch, ppo_cartpole

CASES = {
    'impala_catch': (impala_catch, 0.8),
    'ppo_cartpole': (ppo_cartpole, 400.0),
    'impala_cartpole': (impala_cartpole, 400.0),
}


@functools.cache
def _parts(module):
  """Compiled once for all seeds."""
  return build.make_parts(module.get_config().to_dict())


@pytest.mark.parametrize('seed', [1, 2, 3])
@pytest.mark.parametrize('name', CASES)
def test_learns(name, seed):
  module, threshold = CASES[name]
  parts = _parts(module)
  parts = parts._replace(config=parts.config | {'seed': seed})
  returns = collections.deque(maxlen=100)

  def report(item):
    metrics = jax.device_get(item.metrics)
    for i in range(item.count):
      episodes = jax.tree.map(lambda x, i=i: x[i], metrics['episodes'])
      returns.extend(episodes.episode_return[episodes.ended])

  with build.segment(parts, build.initial_state(parts), 0, 10**6, report) as segment:
    loops.run(segment.workers)
  assert len(returns) == 100
  assert sum(returns) / 100 >= threshold
