"""The Atari configs are Cleanba's tables 2 and 3, on the protocol of Machado et al."""

import pytest

from podracer_jit.configs import impala_atari, ppo_atari

# 1709.06009, table 2 and section 3; EnvPool's no-ops: 1 is none.
PROTOCOL = {
    'env.num_envs': 128, 'env.repeat_action_probability': 0.25, 'env.full_action_space': True,
    'env.noop_max': 1, 'env.episodic_life': False, 'env.frame_skip': 4,
    'env.max_episode_steps': 108_000 // 4, 'env.reward_clip': True,
    'total_steps': 50_000_000, 'num_minibatches': 4, 'optimizer.anneal': True,
    'loss.discount': 0.99, 'loss.entropy_coef': 0.01, 'scheme': 'cleanba'}
CASES = {  # 2310.00036
    'table 3': (impala_atari, {
        'unroll_length': 20, 'num_epochs': 1, 'network.name': 'impala_resnet',
        'optimizer.name': 'rmsprop', 'optimizer.learning_rate': 6e-4, 'optimizer.decay': 0.99,
        'optimizer.eps': 0.01, 'optimizer.max_grad_norm': 40.0, 'loss.baseline_coef': 0.5,
        'loss.vtrace_lambda': 1.0, 'loss.clip_rho': 1.0, 'loss.clip_pg_rho': 1.0}),
    'table 2': (ppo_atari, {
        'unroll_length': 128, 'num_epochs': 4, 'optimizer.name': 'adam',
        'optimizer.learning_rate': 2.5e-4, 'optimizer.eps': 1e-5, 'optimizer.max_grad_norm': 0.5,
        'loss.gae_lambda': 0.95, 'loss.clip': 0.1, 'loss.clip_value': False,
        'loss.value_coef': 0.5, 'loss.normalise_advantage': True})}


@pytest.mark.parametrize('case', CASES)
def test_is_the_papers_table(case):
  module, expected = CASES[case]
  config = module.get_config()
  for field, value in (PROTOCOL | expected).items():
    found = config
    for part in field.split('.'):
      found = found[part]
    assert found == value, field
