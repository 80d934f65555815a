"""The command line: finding the config, setting its fields, and errors."""

import json

import ml_collections
import pytest
from absl import flags

from podracer_jit.run import command_line, config, evaluation, workdirs
from podracer_jit.run.commands import evaluate, train
from podracer_jit.run.resolve import resolve
from tests import processes
from tests.runs import small

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
  return config
"""


def parse(*args):
  return command_line.parse(['podracer_jit', *map(str, args)], flags.FlagValues())


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
  fields = config.plain(command_line.load_config(name))
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
    ('import nowhere_to_be_seen\n', 'ModuleNotFoundError'),
    ('def get_config(:\n', 'SyntaxError'),
    ('def get_config():\n  raise RuntimeError("two\\nlines")\n', 'RuntimeError: two lines')])
def test_a_file_that_is_no_config_is_refused_in_one_line(text, message, tmp_path, capsys):
  path = tmp_path / 'wrong_config.py'
  path.write_text(text)
  assert train.main(['podracer_jit', f'--config={path}']) == 2
  error = capsys.readouterr().err
  assert error.startswith('podracer_jit: --config: ') and error.count('\n') == 1
  assert message in error


def _save(workdir, fields):
  workdir.mkdir(exist_ok=True)
  (workdir / 'config.json').write_text(json.dumps({'config': fields, 'versions': {}}))


def test_a_workdir_from_before_a_field_existed_can_be_opened(tmp_path):
  """For example, when only an MLP could have a separate critic, a CNN had no such field."""
  fields = resolve(small(task='Pong-v5', network='nature_cnn')).fields
  before = json.loads(json.dumps(fields))
  del before['network']['separate_critic'], before['microbatch_rows']
  _save(tmp_path, before)
  workdirs.open_workdir(tmp_path, fields)
  assert workdirs.read_config(tmp_path)['network']['separate_critic'] is False
  experiment = evaluation.read_experiment(tmp_path)
  assert experiment.torso_options.separate_critic is False and experiment.microbatch_rows == 0
  changed = fields | {'network': fields['network'] | {'separate_critic': True}}
  with pytest.raises(workdirs.ConfigChanged, match='network.separate_critic: False there, True'):
    workdirs.open_workdir(tmp_path, changed)


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
