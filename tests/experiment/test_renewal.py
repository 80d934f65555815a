"""Options of segments and checkpoints, and which runs go on exactly after a stop."""

import re

import pytest

from podracer_jit import experiment
from podracer_jit.experiment import build, checks
from podracer_jit.experiment.resolve import resolve
from tests.runs import changed, small
from tests.schemes import test_apex, test_function_envs


def test_the_defaults():
  config = experiment.config('ppo', 'mlp', 'adam')
  assert config.env.renew_every_updates == 1000
  assert (config.checkpoint.every_seconds, config.checkpoint.every_updates,
          config.checkpoint.keep, config.checkpoint.replay) == (60.0, 0, 3, True)


def test_an_env_that_is_a_dict_of_task_and_environments_has_the_default():
  config = small()
  config['env'] = dict(task='CartPole-v1', num_envs=8)
  assert resolve(config).env.renew_every_updates == 1000
  config['env']['renew_every_updates'] = 7
  assert resolve(config).env.renew_every_updates == 7


@pytest.mark.parametrize('field, value, message', [
    ('env__renew_every_updates', -1, 'env.renew_every_updates: must not be negative, got -1'),
    ('env__renew_every_updates', 2**31,
     'env.renew_every_updates: must be below 2^31, got 2147483648'),
    ('env__renew_every_updates', 1.5, 'env.renew_every_updates: must be a whole number, got 1.5'),
    ('checkpoint__every_updates', -1, 'checkpoint.every_updates: must not be negative, got -1'),
    ('checkpoint__every_updates', 2**31,
     'checkpoint.every_updates: must be below 2^31, got 2147483648'),
    ('checkpoint__every_seconds', -1.0, 'checkpoint.every_seconds: must '),
    ('checkpoint__every_seconds', 1e10, 'checkpoint.every_seconds: must '),
    ('checkpoint__every_seconds', float('nan'), 'checkpoint.every_seconds: must '),
    ('checkpoint__keep', 0, 'checkpoint.keep: must be at least 1, got 0')])
def test_a_value_out_of_range_is_refused(field, value, message):
  with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
    resolve(changed(small(), **{field: value}))


@pytest.mark.parametrize('fields', [
    dict(env__renew_every_updates=0), dict(checkpoint__every_seconds=0),
    dict(checkpoint__every_seconds=0.5), dict(checkpoint__every_updates=0)])
def test_zero_is_no_renewal_and_no_checkpoint(fields):
  resolve(changed(small(), **fields))


@pytest.mark.parametrize('every, first, end', [(5, 0, 5), (5, 7, 12), (0, 0, 2**31 - 1),
                                               (0, 7, 2**31 - 1), (2**31 - 1, 9, 2**31 - 1)])
def test_the_update_with_which_a_segment_ends(every, first, end):
  assert build.segment_end(resolve(changed(small(), env__renew_every_updates=every)), first) == end


@pytest.mark.parametrize('config, exactly', [
    (small(), True), (changed(small(), scheme='cleanba'), True),
    (changed(small(), scheme='impala'), False),
    (changed(small(), scheme='impala', env_batch=4), False),
    (test_function_envs.experiment(scheme='fused'), True),
    (test_apex.config('dqn'), True), (test_apex.config('dqn', checkpoint__replay=False), False),
    (test_apex.config('dqn', scheme='apex'), False)])
def test_which_runs_go_on_exactly(config, exactly):
  config = config if isinstance(config, dict) else config.to_dict()
  assert resolve(config).resumes_exactly == exactly


def test_a_config_of_earlier_versions_is_told_what_decides_now():
  def notes(**fields):
    return [line for line in checks.notes(resolve(changed(small(), **fields)))
            if 'version 0.7' in line]
  (line,) = notes(env__renew_every_updates=1000, checkpoint__every_updates=6)
  assert line.startswith('checkpoint.every_updates: 6, which is only how often the run is saved; '
                         'when environments begin anew is decided by env.renew_every_updates = ')
  assert not notes(env__renew_every_updates=999, checkpoint__every_updates=6)
  assert not notes(env__renew_every_updates=1000, checkpoint__every_updates=0)
