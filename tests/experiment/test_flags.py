"""The command line: finding the config, setting its fields, and errors."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from absl.flags import FlagValues

from podracer_jit import parts
from podracer_jit.cli import evaluate, train
from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment import config_dict, flags, modules
from podracer_jit.experiment.resolve import resolve
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation
from podracer_jit.workdir import record
from podracer_jit.workdir.workdir import Workdir, make_request
from tests import processes
from tests.runs import changed, open_workdir, small

CONFIG = """
from ml_collections import config_dict
from podracer_jit import experiment

def get_config(argument=''):
  config = experiment.config('impala', 'mlp', 'adam', seed=7)
  config.env.task = 'Catch-v0'
  if argument == 'unset':
    config.unroll_length = config_dict.placeholder(int)
  if argument == 'required':
    config.checkpoint.keep = config_dict.required_placeholder(int)
  if argument == 'twice':
    config.num_shards = config.get_ref('num_epochs') * 2
  if argument == 'scheduled':
    config.optimizer.learning_rate = 'linear:0.2:0.1'
  if argument == 'placeholder':
    config.optimizer.learning_rate = config_dict.placeholder(float)
  return config
"""


def parse(*args):
  return flags.parse(['podracer_jit', *map(str, args)], FlagValues())


@pytest.fixture
def file(tmp_path):
  """A config file in a folder of the user's own."""
  path = tmp_path / 'own_config.py'
  path.write_text(CONFIG)
  return path


@pytest.mark.quick
def test_an_unknown_field_is_refused_in_one_line(tmp_path):
  done = processes.run(processes.command(
      '--config=configs/impala_catch.py:smoke', '--config.sede=3', f'--workdir={tmp_path}/run'))
  assert done.returncode == 2
  (line,) = [line for line in done.stderr.splitlines() if 'podracer_jit: ' in line]
  assert '--config.sede' in line and 'seed' in line
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('name', [
    'impala_catch', 'impala_catch.py', 'configs/impala_catch.py', 'impala_catch:smoke'])
def test_a_shipped_config_can_be_named_from_any_folder(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  fields = parse(f'--config={name}')
  assert fields['env']['task'] == 'Catch-v0'
  assert fields['total_steps'] == (5_000 if 'smoke' in name else 300_000)


def test_a_file_in_the_current_folder_comes_before_a_shipped_config(file, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  file.rename('impala_catch.py')
  assert parse('--config=impala_catch.py')['seed'] == 7
  assert parse('--config=impala_catch')['seed'] == 1  # the folder has no file of this name


def test_a_directory_is_never_a_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'impala_catch').mkdir()
  assert parse('--config=impala_catch')['env']['task'] == 'Catch-v0'
  for folder in (tmp_path, 'configs', ''):
    with pytest.raises(ValueError, match='there is no such file.*impala_atari'):
      parse(f'--config={folder}')


@pytest.mark.parametrize('text, value', [
    ('(0,1)', (0, 1)), ('0,1', (0, 1)), ('(2,)', (2,)), ('3', (3,)), ('()', ())])
def test_flags_can_set_tuples(file, text, value):
  fields = parse(f'--config={file}', f'--config.placement.actor_devices={text}')
  assert fields['placement']['actor_devices'] == value


def test_an_integer_is_accepted_for_a_float_field(file):
  fields = parse(f'--config={file}', '--config.loss.discount=1', '--config.log.every_seconds=3')
  experiment = resolve(fields)
  values = experiment.algorithm.discount, experiment.log.every_seconds
  assert values == (1.0, 3.0) and all(isinstance(value, float) for value in values)


@pytest.mark.parametrize('flags, rate', [
    (['cosine:0.1:0'], 'cosine:0.1:0'), (['cosine:0.1:0', 'linear:0.1:0'], 'linear:0.1:0'),
    (['cosine:0.1:0', '1e-2'], 0.01), (['1', 'linear:1:0.5:1_000steps'], 'linear:1:0.5:1000steps')])
@pytest.mark.parametrize('argument', ['', ':scheduled', ':placeholder'])
def test_a_flag_sets_a_number_or_a_schedule(file, argument, flags, rate):
  fields = parse(f'--config={file}{argument}', '--config.optimizer.anneal=False',
                 *(f'--config.optimizer.learning_rate={text}' for text in flags),
                 '--config.loss.entropy_coef', 'piecewise:0.1:0.5=-0.1')
  experiment = resolve(json.loads(json.dumps(fields)))
  assert fields['optimizer']['learning_rate'] == (flags[-1] if isinstance(rate, str) else rate)
  assert str(experiment.optimizer.learning_rate) == str(rate)
  assert str(experiment.algorithm.entropy_coef) == 'piecewise:0.1:0.5=-0.1'
  assert experiment.algorithm.discount == 0.99


@pytest.mark.parametrize('flag, message', [
    ('loss.entropy_coef=linear:1', 'loss.entropy_coef: linear needs the first and the last number'),
    ('loss.entropy_coef=fast', 'loss.entropy_coef: must be a number, or a schedule .* such as '
                               "linear:0.1:0, got 'fast'"),
    ('optimizer.b1=linear:0.9:1', "optimizer.b1: its number 1 must be below 1, got 'linear:0.9:1'"),
    ('optimizer.kl_target=linear:1:0', 'optimizer.kl_target: must be a number; it cannot change'),
    ('optimizer.learning_rate=linear:0.1:0', 'optimizer.anneal: the learning_rate changes by'),
    *((f'{field}=linear:1:2', f'{field}: must .*; only fractional numbers of loss and optimizer '
       "may change during a run, got 'linear:1:2'") for field in (
           'num_epochs', 'exact_reduce', 'env.num_envs', 'log.every_seconds', 'network.core_size')),
    ('log.every_seconds=fast', "log.every_seconds: must be a number, got 'fast'")])
def test_a_wrong_schedule_is_refused_in_one_line(file, flag, message, capsys):
  assert train.main(['podracer_jit', f'--config={file}', f'--config.{flag}']) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert re.match(f'podracer_jit: {message}', line), line


def test_a_field_of_a_config_is_a_number_or_a_schedule(file):
  fields = flags.load_config(str(file))
  fields.loss.discount = 'linear:0.9:0.99'
  fields.optimizer.update(b1='cosine:0.9:0.5')
  assert str(resolve(fields).algorithm.discount) == 'linear:0.9:0.99'
  assert str(resolve(fields).optimizer.b1) == 'cosine:0.9:0.5'
  fields.loss.discount = 1
  assert resolve(copy.deepcopy(fields)).algorithm.discount == 1.0
  for section, name, value in ((fields.loss, 'discount', 'fast'), (fields, 'num_epochs', '3'),
                               (fields.loss, 'name', 3)):
    with pytest.raises(TypeError, match=f'^{name}: must be a '):
      section[name] = value
  fields.num_epochs = 'linear:1:3'
  with pytest.raises(ValueError, match='^num_epochs: must be a whole number; only fractional'):
    resolve(fields)


def test_an_own_algorithms_options_may_change(file):
  fields = parse(f'--config={file}', '--config.loss.name=examples.a2c:A2C',
                 '--config.loss.value_coef=linear:1:0.5:0.1')
  assert str(resolve(fields).algorithm.value_coef) == 'linear:1:0.5:0.1'


def test_a_schedule_belongs_to_the_config_of_a_workdir(tmp_path):
  before = small()
  before['optimizer'] |= {'anneal': False, 'learning_rate': 'linear:0.1:0.01'}
  after = changed(before, optimizer__learning_rate='linear:0.1:0.02')
  open_workdir(tmp_path, resolve(before).fields)
  (tmp_path / 'metrics.jsonl').write_text('{"update": 1}\n')
  assert Workdir(tmp_path).config()['optimizer']['learning_rate'] == 'linear:0.1:0.01'
  with pytest.raises(OtherExperiment, match="'linear:0.1:0.01' there, 'linear:0.1:0.02' now"):
    open_workdir(tmp_path, resolve(after).fields)
  for fields in (after, changed(after, optimizer__learning_rate=0.05)):
    open_workdir(tmp_path, resolve(fields).fields, change=['optimizer.learning_rate'])


@pytest.mark.parametrize('text', ['1.5', 'many', 'True'])
def test_a_value_of_another_type_is_refused(file, text):
  with pytest.raises(ValueError, match='num_epochs'):
    resolve(parse(f'--config={file}', f'--config.num_epochs={text}'))


def test_a_placeholder_is_set_by_a_flag(file):
  assert resolve(parse(f'--config={file}:unset', '--config.unroll_length=9')).unroll_length == 9


def test_an_unset_placeholder_is_named(file, capsys):
  assert train.main(['podracer_jit', f'--config={file}:unset']) == 2
  assert capsys.readouterr().err == (
      'podracer_jit: unroll_length: has no value yet; set it, for example by '
      '--config.unroll_length=\n')
  args = [f'--config={file}:required', '--config.checkpoint.keep=2']
  assert train.main(['podracer_jit', *args]) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1 and 'checkpoint.keep is a required_placeholder' in error


def test_a_config_with_placeholders_is_resolved_without_a_command_line():
  fields = ml_collections.ConfigDict(small())
  for placeholder in (ml_collections.config_dict.placeholder,
                      ml_collections.config_dict.required_placeholder):
    fields.seed = placeholder(int)
    with pytest.raises(ValueError, match='^seed: has no value yet'):
      resolve(fields)
    fields.seed = 3
    assert resolve(fields).seed == 3


def test_a_field_follows_the_one_that_it_refers_to(file):
  assert parse(f'--config={file}:twice', '--config.num_epochs=4')['num_shards'] == 8


def test_any_option_of_the_task_can_be_set(file):
  fields = parse(f'--config={file}', '--config.env.height=12', '--config.env.width', '7')
  assert resolve(fields).spec.obs_shape == (12, 7)
  assert resolve(fields).env_options == dict(height=12, width=7)


def test_an_unknown_option_of_the_task_is_refused(file):
  fields = parse(f'--config={file}', '--config.env.hight=12')
  with pytest.raises(ValueError, match='env.hight: not an option of Catch-v0.*height'):
    resolve(fields)


@pytest.mark.parametrize('text, value', [
    ('true', True), ('False', False), ('0.25', 0.25), ('(1,2)', (1, 2)), ('word', 'word')])
def test_flags_parse_values_of_task_options(file, text, value):
  assert parse(f'--config={file}', f'--config.env.any={text}')['env']['any'] == value


def test_own_parts_can_lie_beside_the_config_file(file, tmp_path, monkeypatch):
  """Neither PYTHONPATH nor the working directory matter."""
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  monkeypatch.chdir(elsewhere)
  (tmp_path / 'mine_beside.py').write_text("""
import flax.linen as nn
from podracer_jit.options import option

class Torso(nn.Module):
  '''One layer.'''

  width: int = option(5, 'units', at_least=1)

  @nn.compact
  def __call__(self, obs):
    return nn.tanh(nn.Dense(self.width)(obs.reshape(len(obs), -1)))
""")
  fields = parse(f'--config={file}', '--config.network.name=mine_beside:Torso',
                '--config.network.width=6')
  experiment = resolve(fields)
  assert type(experiment.network).__name__ == 'Torso' and experiment.network.width == 6
  with pytest.raises(ValueError, match='network.width: must be at least 1, got 0'):
    resolve(fields | {'network': fields['network'] | {'width': 0}})
  with pytest.raises(ValueError, match="network.name: mine_beside has no 'Torsoo'"):
    parse(f'--config={file}', '--config.network.name=mine_beside:Torsoo')


@pytest.mark.parametrize('name', ['impala_catch', 'apex_dqn_catch'])
def test_help_with_a_config_explains_every_field(name, capsys):
  assert train.main(['podracer_jit', f'--config={name}', '--help']) == 0
  lines = capsys.readouterr().out.splitlines()
  fields = config_dict.plain(flags.load_config(name))
  names = {f'{section}.{field}' for section, value in fields.items() if isinstance(value, dict)
           for field in value}
  names |= {field for field, value in fields.items() if not isinstance(value, dict)}
  meanings = {line.split(' = ')[0].strip(): lines[i + 1].strip()
              for i, line in enumerate(lines) if line.startswith('  ') and ' = ' in line}
  assert names <= set(meanings)
  assert all(meanings[field] for field in names)


def test_help_shows_values_set_by_flags(file, capsys):
  assert parse(f'--config={file}:unset', '--config.seed=77', '--help') is None
  out = capsys.readouterr().out
  assert '\n  seed = 77\n' in out and '\n  unroll_length = None\n' in out


@pytest.mark.parametrize('text, message', [
    ('def get_config():\n  return 3\n', 'must return the result of experiment.config, got int'),
    ('x = 1\n', 'has no function get_config'),
    ('import nowhere_to_be_seen\n', '(wrong_config.py, line 1): ModuleNotFoundError'),
    ('def get_config():\n  return {}["a"]\n', "(wrong_config.py, line 2): KeyError: 'a'"),
    ('from podracer_jit import experiment\ndef get_config():\n'
     '  config = experiment.config("ppo", "mlp", "adam")\n  config.total_steps = 1e6\n',
     'total_steps: must be a whole number, got 1000000.0'),
    ('def get_config():\n  return dict(env=dict(task="CartPole-v1"))\n',
     'scheme: is missing; known are sync, cleanba'),
    ('def get_config(argument):\n  pass\n', 'needs an argument; write --config='),
    ('def get_config(:\n', 'SyntaxError'),
    ('def get_config():\n  raise RuntimeError("two\\nlines")\n', 'RuntimeError: two lines')])
def test_a_file_that_is_no_config_is_refused_in_one_line(text, message, tmp_path, capsys):
  path = tmp_path / 'wrong_config.py'
  path.write_text(text)
  assert train.main(['podracer_jit', f'--config={path}']) == 2
  error = capsys.readouterr().err
  assert re.match(r'podracer_jit: (--config( \(\w+.py, line \d\))?|scheme): ', error)
  assert error.count('\n') == 1 and message in error


def test_an_argument_for_a_config_that_takes_none_is_refused(tmp_path):
  path = tmp_path / 'takes_none.py'
  path.write_text('def get_config():\n  return {}\n')
  with pytest.raises(ValueError, match=f'takes no argument; write --config={path}$'):
    flags.load_config(f'{path}:smoke')


def _save(workdir, fields):
  workdir.mkdir(exist_ok=True)
  (workdir / 'config.json').write_text(json.dumps({'config': fields, 'versions': {}}))


def test_a_workdir_from_before_a_field_existed_can_be_opened(tmp_path):
  """For example, when only an MLP could have a separate critic, a CNN had no such field."""
  fields = resolve(small(task='Pong-v5', network='nature_cnn')).fields
  before = json.loads(json.dumps(fields))
  del before['network']['separate_critic'], before['microbatch_rows']
  _save(tmp_path, before)
  open_workdir(tmp_path, fields)
  (tmp_path / 'metrics.jsonl').write_text('{"update": 1}\n')
  assert Workdir(tmp_path).config()['network']['separate_critic'] is False
  experiment = evaluation.read_experiment(tmp_path)
  assert experiment.torso_options.separate_critic is False and experiment.microbatch_rows == 0
  other = fields | {'network': fields['network'] | {'separate_critic': True}}
  with pytest.raises(OtherExperiment, match='network.separate_critic: False there, True'):
    open_workdir(tmp_path, other)


@pytest.mark.parametrize('section, message', [
    ('', 'surprise: there is no such field'), ('network', 'network.surprise: mlp does not have it'),
    ('placement', 'placement.surprise: there is no such field')])
def test_evaluate_refuses_a_workdir_with_an_unknown_field(section, message, tmp_path, capsys):
  fields = json.loads(json.dumps(resolve(small()).fields))
  (fields[section] if section else fields)['surprise'] = 1
  _save(tmp_path, fields)
  assert evaluate.main(['podracer_jit evaluate', f'--workdir={tmp_path}']) == 2
  error = capsys.readouterr().err
  assert error.startswith(f'podracer_jit evaluate: --workdir: config.json of {tmp_path}: ')
  assert message in error and error.count('\n') == 1


def test_a_config_has_no_new_fields_except_for_the_tasks_options(file):
  fields = flags.load_config(str(file))
  for section, name, message in (
      (fields.optimizer, 'lr', 'lr: the config has no such field; There are anneal, b1'),
      (fields, 'optimiser', 'optimiser: .* did you mean optimizer?'),
      (fields.placement, 'actor_device', 'did you mean actor_devices?')):
    for error in (AttributeError, KeyError):
      with pytest.raises(error, match=message) as raised:
        setattr(section, name, 3) if error is AttributeError else section.update({name: 3})
      assert '\n' not in str(raised.value)
  fields.env.height = 12
  with fields.unlocked():
    fields.env.width = 7
  fields.env.update(extra=1)
  fields.loss.discount = 0.5
  assert config_dict.plain(fields)['env'] == dict(
      task='Catch-v0', num_envs=128, renew_every_updates=1000, action_mask='action_mask', height=12,
      width=7, extra=1)
  copied = copy.deepcopy(fields)
  copied.env.other = 1
  with pytest.raises(AttributeError):
    copied.lost = 1


def test_a_config_of_other_kinds_is_locked_too(tmp_path):
  path = tmp_path / 'own_plain.py'
  path.write_text('from podracer_jit import experiment\n\ndef get_config():\n'
                  "  return experiment.config('ppo', 'mlp', 'adam').to_dict()\n")
  fields = flags.load_config(str(path))
  fields.env.height = 1
  with pytest.raises(AttributeError, match='momentum: the config has no such field'):
    fields.optimizer.momentum = 1


def test_numbers_of_numpy_and_jax_are_pythons_in_a_config(file):
  fields = flags.load_config(str(file))
  fields.total_steps = np.int64(5)
  fields.optimizer.learning_rate = jnp.float32(0.5)
  fields.loss.discount = np.float32(0.25)
  fields.network.hidden = (np.int64(3),)
  fields.env.goal = [np.float32(1), {'a': np.bool_(True)}]
  plain = config_dict.plain(fields)
  assert repr([plain['total_steps'], plain['optimizer']['learning_rate'], plain['loss']['discount'],
               plain['network']['hidden'], plain['env']['goal']]) == (
                   "[5, 0.5, 0.25, (3,), [1.0, {'a': True}]]")
  by_hand = small(seed=np.int64(7)) | {'total_steps': np.int32(3)}
  assert type(resolve(by_hand).total_steps) is type(resolve(by_hand).seed) is int


@pytest.mark.parametrize('value', [np.arange(2), len, {1: 'a'}, {1}, b'x', object()])
def test_an_option_of_the_task_that_no_file_can_hold_is_refused(value, file):
  fields = flags.load_config(str(file))
  fields.env.goal = value
  with pytest.raises(ValueError, match=r'^env\.goal: must consist of numbers') as error:
    resolve(fields)
  assert '\n' not in str(error.value)


def test_classes_are_named_and_not_given(file):
  fields = flags.load_config(str(file))
  with pytest.raises(ValueError, match="env.task: must be the text 'json.decoder:JSONDecoder'"):
    fields.env.task = json.JSONDecoder
  mine = type('Mine', (), {'__module__': '__main__'})
  with pytest.raises(ValueError, match="name: must be a text such as 'mine:Mine'; .* mine.py"):
    fields.network.name = mine
  with pytest.raises(ValueError, match='top level of mine.py; .*<locals>.local is inside of an'):
    def local():
      pass
    fields.env.task = local
  by_hand = small()
  by_hand['env']['task'] = mine
  with pytest.raises(ValueError, match="env.task: must be a text such as 'mine:Mine'"):
    resolve(by_hand)


def test_help_names_the_fields_once_and_says_how_to_see_them(capsys):
  assert train.main(['podracer_jit', '--config=ppo_cartpole', '--help']) == 0
  out = capsys.readouterr().out
  assert '!!python' not in out and out.count('learning_rate') == 1
  assert train.main(['podracer_jit', '--help']) == 0
  assert '--config=NAME --help' in ' '.join(capsys.readouterr().out.split())


def test_a_tilde_is_the_home_folder(file, tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert parse(f'--config=~/{file.name}')['seed'] == 7
  assert modules.allowed([f'~/{file.name}']) == {'own_config'}
  assert user_path('~/x') == tmp_path / 'x' != user_path('a/~')
  assert make_request(init_from='~/a').init_from == tmp_path / 'a'


def test_an_unknown_home_is_said_in_one_line():
  with pytest.raises(ValueError, match='~nobody_here/x: the home folder is not known'):
    user_path('~nobody_here/x')


@pytest.mark.parametrize('path', ['gs://bucket/x', 's3://bucket/x', Path('gs://bucket/x')])
def test_an_address_is_not_taken_for_a_folder(path):
  with pytest.raises(ValueError, match=f'^{path}: is an address, not a path; mount'):
    user_path(path)
  assert user_path('./gs:/x') == Path('gs:/x') and user_path('a/b:/c') == Path('a/b:/c')


def test_a_config_is_called_and_imports_as_python_files_may(tmp_path):
  text = CONFIG.replace('def get_config', 'from beside_all import SEED\n\ndef get_config').replace(
      'seed=7', 'seed=SEED')
  (tmp_path / 'beside_all.py').write_text('SEED = 8\n')
  for name in ('random.py', 'ppo_v1.2.py', 'ppo-cart.py', '1st.py', 'ünï ✓.py'):
    (tmp_path / name).write_text('\ufeff' + text)
    assert parse(f'--config={tmp_path / name}')['seed'] == 8
  sys.modules.pop('beside_all')


def test_lists_and_tuples_of_the_tasks_options_stay_what_they_are(tmp_path):
  values = {'a': [1, (2,)], 'b': (3, [4]), 'c': {'x': [5], 'y': (6,)}, 'd': float('nan')}
  fields = small()
  fields['env'] |= values
  open_workdir(tmp_path, fields)
  assert open_workdir(tmp_path, fields) == []
  read = Workdir(tmp_path).config()
  assert repr({name: read['env'][name] for name in values}) == repr(values)
  assert read['network']['hidden'] == (64, 64)
  # A file of an older version does not tell lists from tuples.
  record = json.loads((tmp_path / 'config.json').read_text())
  record['config']['env'] |= json.loads(json.dumps(values))
  (tmp_path / 'config.json').write_text(json.dumps(record))
  (tmp_path / 'metrics.jsonl').write_text('{"update": 1}\n')
  assert Workdir(tmp_path).config()['env']['a'] == (1, (2,))
  other = fields | {'env': fields['env'] | {'a': [1, (3,)]}}
  message = r'env.a: \(1, \(2,\)\) there, \[1, \(3,\)\] now'
  with pytest.raises(OtherExperiment, match=message):
    open_workdir(tmp_path, other)
  assert open_workdir(tmp_path, fields) == []
  assert Workdir(tmp_path).config()['env']['a'] == [1, (2,)]  # as it is now


def test_the_commands_that_train_a_run_are_noted(tmp_path, monkeypatch):
  monkeypatch.setattr(parts, '_files', [])
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'argv', ['podracer_jit', '--config=mine'])
  run = record.new(small()).started(1)
  assert run.started(5) is run
  git = ['git', '-c', 'user.name=x', '-c', 'user.email=x']
  subprocess.run([*git, 'init', '-q'], check=True)
  subprocess.run([*git, 'commit', '-q', '--allow-empty', '-m', 'x'], check=True)
  head = subprocess.run([*git, 'rev-parse', 'HEAD'], check=True, capture_output=True, text=True)
  run = run.started(7)
  monkeypatch.setenv('PATH', '')  # no git
  run = run.started(9)
  assert [(start['first_update'], start['commit']) for start in run.starts] == [
      (1, None), (7, head.stdout.strip()), (9, None)]
  assert run.starts[0]['command'] == ['podracer_jit', '--config=mine'] and run.starts[0]['host']
  hardware = run.starts[0]['hardware']
  assert hardware['processor'] and hardware['threads'] == len(os.sched_getaffinity(0))
  assert hardware['memory'] > 2**28 and hardware['accelerators'] == []
  # A start is no part of the experiment, and a change keeps them.
  assert not run.differences(small())
  other = changed(small(), loss__discount=0.5)
  assert record.parse(run.changed(other, 4).as_json()).starts == run.starts
