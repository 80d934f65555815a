"""A stranger's workdir is data: nothing in it is imported or executed."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from podracer_jit import api, options, parts
from podracer_jit.cli import compare, evaluate, export, rerun, train
from podracer_jit.experiment import build, modules
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime import host, output
from podracer_jit.training import evaluator
from podracer_jit.training.progress import Progress
from podracer_jit.workdir import checkpoints, record
from podracer_jit.workdir.workdir import Workdir
from tests import made
from tests.play.test_agent import untrained
from tests.runs import QUICK, changed, open_workdir, prepared, small, train_in

FIELDS = [('loss', 'name'), ('network', 'name'), ('optimizer', 'name'), ('env', 'task'),
          ('scheme', None), ('policy', None)]


@pytest.fixture
def strange(tmp_path, monkeypatch):
  """Returns a function that makes a workdir whose config names a module.

  The module creates the file `ran` when it is imported.
  """
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  (tmp_path / 'evil.py').write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'evil', raising=False)

  def make(section, field):
    workdir = tmp_path / 'run'
    workdir.mkdir()
    fields = small()
    if field:
      fields[section][field] = 'evil:Thing'
    else:
      fields[section] = 'evil:Thing'
    record = dict(config=fields, versions={})
    (workdir / 'config.json').write_text(json.dumps(record))
    (workdir / 'receipts.jsonl').write_text(
        json.dumps(dict(segment=0, first_update=1, versions={}, canary='')) + '\n'
        + json.dumps(dict(update=1, batch='0' * 16, params='0' * 16)) + '\n')
    (workdir / 'metrics.jsonl').write_text('')
    return workdir

  return make


@pytest.mark.parametrize('section, field', FIELDS)
@pytest.mark.parametrize('verb', [evaluate, rerun])
def test_a_module_that_a_workdir_names_is_not_imported(verb, section, field, strange, tmp_path,
                                                       capsys):
  args = [f'--workdir={strange(section, field)}', *(['--update=1'] if verb is rerun else [])]
  assert verb.main(['podracer_jit', *args]) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1
  name = f'{section}.{field}' if field else section
  assert f'{name} = evil:..., which runs {tmp_path / "evil.py"}' in error
  assert '--allow_modules=evil' in error
  assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('allow', ['evil', '{folder}/evil.py'])
def test_a_module_that_is_allowed_is_imported(allow, strange, tmp_path, capsys):
  workdir = strange('loss', 'name')
  flag = f'--allow_modules={allow.format(folder=tmp_path)}'
  assert evaluate.main(['podracer_jit', f'--workdir={workdir}', flag]) == 2
  assert "evil has no 'Thing'" in capsys.readouterr().err
  assert (tmp_path / 'ran').exists()


def test_a_comparison_imports_nothing(strange, tmp_path, capsys):
  workdir = strange('loss', 'name')
  assert compare.main(['podracer_jit', str(workdir), str(workdir)]) == 0
  assert 'identical: 1 updates' in capsys.readouterr().out
  assert not (tmp_path / 'ran').exists()


def test_training_in_a_strange_workdir_imports_nothing(strange, tmp_path, capsys):
  workdir = strange('loss', 'name')
  assert train.main(['podracer_jit', '--config=impala_catch:smoke', f'--workdir={workdir}']) == 2
  error = capsys.readouterr().err
  assert "loss.name: 'evil:Thing' there, 'impala' now" in error
  assert not (tmp_path / 'ran').exists()


ONLY_IMPORTS = """
import dataclasses, functools, os
from os import system
run = functools.partial(os.system)
"""


@pytest.mark.parametrize('attribute, message', [
    ('dataclasses.inspect.os.system', "leads through 'dataclasses'; .* one name of the module"),
    ('system', 'leads to posix.system, which mine_only does not define; must be a class'),
    ('run', 'leads to posix.system, which mine_only does not define; must be a class'),
    ('os', 'leads to os, which mine_only does not define; must be a class')])
@pytest.mark.parametrize('field', ['env.task', 'loss.name', 'network.name', 'optimizer.name',
                                   'scheme', 'policy'])
def test_what_an_allowed_module_imports_is_not_allowed(
    field, attribute, message, saved_run, tmp_path, monkeypatch, capsys):
  """An option of the task would be the argument of the call, here a command for a shell."""
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  (tmp_path / 'mine_only.py').write_text(ONLY_IMPORTS)
  workdir = tmp_path / 'run'
  shutil.copytree(saved_run / 'run', workdir)
  record = json.loads((workdir / 'config.json').read_text())
  set_field(record, f'config/{field.replace(".", "/")}', f'mine_only:{attribute}')
  if field == 'env.task':
    record['config']['env']['command'] = f'touch {tmp_path / "ran"}'
  (workdir / 'config.json').write_text(json.dumps(record))
  allow = f'--allow_modules={tmp_path / "mine_only.py"}'
  assert evaluate.main(['x', f'--workdir={workdir}', allow]) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1
  assert re.search(f"{field}: 'mine_only:{attribute}' {message}", error), error
  assert not (tmp_path / 'ran').exists()
  sys.modules.pop('mine_only', None)


def test_a_flag_to_copy_is_quoted_for_a_shell(strange, tmp_path, capsys):
  workdir = strange('loss', 'name')
  record = json.loads((workdir / 'config.json').read_text())
  record['config']['loss']['name'] = '$(touch ran);x:Mine'
  (workdir / 'config.json').write_text(json.dumps(record))
  assert evaluate.main(['podracer_jit', f'--workdir={workdir}']) == 2
  flag = capsys.readouterr().err.rpartition('if you trust them: ')[2].strip()
  assert shlex.split(flag) == ['--allow_modules=$(touch ran);x']


def test_a_file_that_is_allowed_must_exist(tmp_path):
  with pytest.raises(ValueError, match='--allow_modules: there is no file'):
    modules.allowed([f'{tmp_path}/mine.py'])


# Exits at once if a module is loaded from the workdir, or if anything is unpickled that is no
# compiled program: those are in the user's own cache.
WATCHED = '''
import os, sys
workdir = sys.argv[1]
def in_stored_programs(frame):
  while frame:
    if frame.f_code.co_filename.endswith('runtime/stored_programs.py'):
      return True
    frame = frame.f_back
def watch(event, args):
  if (event == 'pickle.find_class' and not in_stored_programs(sys._getframe())
      or event == 'import' and str(args[1] or '').startswith(workdir)):
    print('forbidden:', event, args, file=sys.stderr, flush=True)
    os._exit(99)
sys.addaudithook(watch)
from podracer_jit.cli.main import main
sys.exit(main(['podracer_jit', 'evaluate', f'--workdir={workdir}', '--num_episodes=2']))
'''


def test_an_evaluation_unpickles_nothing_of_a_workdir(tmp_path):
  run = prepared(small(task='Catch-v0'))
  open_workdir(tmp_path, run.experiment.fields)
  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    state = run.initial_state()
    saved.save(build.Snapshot(state._replace(update=state.update + 1)), {})
  done = subprocess.run([sys.executable, '-P', '-c', WATCHED, tmp_path], capture_output=True,
                        text=True, timeout=300, env=QUICK, check=False)
  assert done.returncode == 0, done.stderr
  assert '2 episodes' in done.stdout


EVIL = '\x1b]0;owned\x07\x1b[2J\r\u202egnp\u2028\x9b31m\x00\nall is well'


def set_field(fields, name, value):
  *path, last = name.split('/')
  for part in path:
    fields = fields.setdefault(part, {})
  fields[last.replace('EVIL', EVIL)] = value


def with_evil(workdir, name, value):
  """Gives a field of config.json, whose name has slashes, a value; and receipts evil texts."""
  record = json.loads((workdir / 'config.json').read_text())
  set_field(record, name, value)
  (workdir / 'config.json').write_text(json.dumps(record))
  path = workdir / 'receipts.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for line in lines:
    if 'update' in line:
      line |= dict(batch=EVIL, params=EVIL)
    else:
      line |= dict(versions={EVIL: EVIL}, canary=EVIL)
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


@pytest.fixture(scope='module')
def saved_run(tmp_path_factory):
  """A workdir with a run and a checkpoint, and an agent of it."""
  def make(folder):
    workdir = folder / 'run'
    workdir.mkdir()
    run = prepared(changed(small(), total_steps=10**6, log__tensorboard=False))
    open_workdir(workdir, run.experiment.fields)
    one_update = changed(run.experiment.fields, total_steps=1)
    train_in(dataclasses.replace(run, experiment=resolve(one_update)), workdir)
    untrained('CartPole-v1').save(folder / 'agent')
  return made.once(tmp_path_factory, 'saved', make)


def check_printed(capsys):
  """Checks that nothing printed controls a terminal or makes a line of its own."""
  for text in capsys.readouterr():
    assert all(line.isprintable() for line in text.split('\n')), ascii(text)
    assert not any(line.startswith('all is well') for line in text.split('\n')), text


FIELDS_WITH_TEXT = [
    ('config/EVIL', 1), ('config/loss/EVIL', 1), ('config/env/EVIL', 1), ('config/env/EVIL', EVIL),
    ('config/network/EVIL', EVIL), ('config/placement/EVIL', 1), ('config/log/EVIL', 1),
    ('config/loss/name', EVIL), ('config/network/name', EVIL), ('config/optimizer/name', EVIL),
    ('config/env/task', EVIL), ('config/env/task', f'gymnasium:{EVIL}'),
    ('config/env/task', f'gymnax:{EVIL}'), ('config/env/task', f'{EVIL}:{EVIL}'),
    ('config/env/task', f'tests.envs:{EVIL}'), ('config/scheme', EVIL), ('config/policy', EVIL),
    ('config/loss/name', f'{EVIL}:A'), ('config/scheme', f'{EVIL}:A'),
    ('config/loss/name', f'tests:{EVIL}'), ('config/seed', EVIL),
    ('config/loss/discount', EVIL), ('config/placement/actor_platform', EVIL),
    ('versions/EVIL', EVIL), ('history', [dict(first_update=1, changes={EVIL: dict(was=EVIL)})]),
    ('history', [dict(first_update=1, init_from=dict(
        workdir=EVIL, update=1, state_sha256=EVIL, taken=[EVIL], fresh=[EVIL], unused=[EVIL]))])]


@pytest.mark.parametrize('name, value', FIELDS_WITH_TEXT)
def test_texts_of_a_workdir_are_printed_escaped(name, value, saved_run, tmp_path, capsys,
                                                monkeypatch):
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  workdir = tmp_path / 'run'
  shutil.copytree(saved_run / 'run', workdir)
  with_evil(workdir, name, value)
  allow = '--allow_modules=tests,tests.envs'
  evaluate.main(['x', f'--workdir={workdir}', '--num_episodes=1', '--num_envs=1', allow])
  check_printed(capsys)
  rerun.main(['x', f'--workdir={workdir}', '--update=1'])
  check_printed(capsys)
  export.main(['x', f'--workdir={workdir}', f'--out={tmp_path / "out"}'])
  check_printed(capsys)
  compare.main(['x', str(workdir), str(saved_run / 'run')])
  check_printed(capsys)
  compare.main(['x', str(saved_run / 'run'), str(workdir)])
  check_printed(capsys)
  # Training there says what has changed.
  fields = json.loads((saved_run / 'run' / 'config.json').read_text())['config']
  try:
    output.complain('; '.join(open_workdir(workdir, fields)))
  except ValueError as error:
    assert str(error).isprintable(), ascii(str(error))
  check_printed(capsys)


@pytest.mark.parametrize('name, value', FIELDS_WITH_TEXT)
def test_errors_about_texts_of_a_workdir_are_escaped(name, value, saved_run, tmp_path,
                                                      monkeypatch):
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)
  for kind in ('run', 'agent'):
    folder = tmp_path / kind
    shutil.copytree(saved_run / kind, folder)
    record = json.loads((folder / 'config.json').read_text())
    set_field(record, name, value)
    (folder / 'config.json').write_text(json.dumps(record))
    if kind == 'agent':
      manifest_file = folder / checkpoints.MANIFEST
      digest = checkpoints.read_manifest(folder)['state_sha256']
      manifest_file.unlink()
      checkpoints.write_manifest(folder, digest)
    try:
      assert repr(api.load(folder, allow_modules=['tests', 'tests.envs'])).isprintable()
    except ValueError as error:
      assert str(error).isprintable(), ascii(str(error))


def nested(levels):
  return json.loads('[' * levels + ']' * levels)


@pytest.mark.parametrize('levels', [90, 450, 10**5])
@pytest.mark.parametrize('name', ['config/env/goal', 'history'])
def test_a_deeply_nested_config_is_refused_in_one_line(name, levels, saved_run, tmp_path, capsys,
                                                       monkeypatch):
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  workdir = tmp_path / 'run'
  shutil.copytree(saved_run / 'run', workdir)
  record = json.loads((workdir / 'config.json').read_text())
  set_field(record, name, 'DEEP')
  text = json.dumps(record).replace('"DEEP"', '[' * levels + ']' * levels)
  (workdir / 'config.json').write_text(text)
  for verb, *args in ([evaluate, '--num_episodes=1'], [rerun, '--update=1'],
                      [export, f'--out={tmp_path / "out"}']):
    assert verb.main(['x', f'--workdir={workdir}', *args]) == 2
    assert capsys.readouterr().err.count('\n') == 1
  compare.main(['x', str(workdir), str(saved_run / 'run')])
  check_printed(capsys)
  fields = json.loads((saved_run / 'run' / 'config.json').read_text())['config']
  with contextlib.suppress(ValueError):
    open_workdir(workdir, fields)


@pytest.mark.parametrize('first_update, name, was', [
    (5, 'seed.x', 1), (5, 'env', 1), (5, 'loss', None), (5, 'placement', 3), (1e999, 'seed', 1)])
def test_a_history_that_does_not_fit_its_config_is_refused_in_one_line(
    first_update, name, was, saved_run, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  workdir = tmp_path / 'run'
  shutil.copytree(saved_run / 'run', workdir)
  record = json.loads((workdir / 'config.json').read_text())
  record['history'] = [dict(first_update=first_update, changes={name: dict(was=was)})]
  (workdir / 'config.json').write_text(json.dumps(record))
  for verb in (evaluate, rerun):
    assert verb.main(['x', f'--workdir={workdir}', '--update=1']) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_what_a_run_takes_as_an_option_of_a_task_can_be_read_again(tmp_path):
  for levels in range(30, 130):
    config = small()
    config['env']['goal'] = nested(levels)
    refused = options.problem_of_json(config['env']['goal'])
    assert bool(refused) == (levels > 40)
    if not refused:
      record.new(config).write(tmp_path)
      assert Workdir(tmp_path).config()['env']['goal'] == config['env']['goal']


LINES = [{}, {'update': 1}, {'update': 1, 'steps': 3}, {'steps': 3, 'episode_return': 1.0},
         {'update': 1, 'steps': 3, 'episode_return': 'x'}, {'update': 1, 'steps': 'x', 'mean': 'x'},
         {'update': 1, 'steps': None, 'mean': None, 'episode_return': [1]},
         {'update': 1, 'steps': 3, 'episode_return': 10**400, 'mean': 10**400},
         {'segment': 0}, {'first_update': 1}, {'update': 1, 'batch': 3, 'params': None}]


@pytest.mark.parametrize('line', LINES)
def test_a_line_with_other_fields_is_garbled_and_fails_nothing(line, saved_run, tmp_path, capsys):
  workdir = tmp_path / 'run'
  shutil.copytree(saved_run / 'run', workdir)
  for name in ('metrics', 'receipts', 'evaluations'):
    with (workdir / f'{name}.jsonl').open('a') as file:
      file.write(json.dumps(line) + '\n')
  for sides in ((workdir, saved_run / 'run'), (saved_run / 'run', workdir)):
    assert compare.main(['x', *map(str, sides)]) == 2
  assert 'identical: 1 updates' in capsys.readouterr().out
  with pytest.raises(ValueError, match='no checkpoint in .* was evaluated during training'):
    evaluator.best_update(workdir)


def test_names_of_arrays_in_a_saved_agent_are_escaped(saved_run, tmp_path):
  folder = tmp_path / 'agent'
  shutil.copytree(saved_run / 'agent', folder)
  digest = checkpoints.read_manifest(folder)['state_sha256']
  (folder / checkpoints.MANIFEST).unlink()
  (folder / 'parameters.safetensors').write_bytes(b'\x05\0\0\0\0\0\0\0{"\x1b[')
  checkpoints.write_manifest(folder, digest)
  with pytest.raises(ValueError, match='parameters.safetensors cannot be read') as refused:
    api.load(folder)
  assert str(refused.value).isprintable()


@pytest.mark.parametrize('text, expected', [
    ('a\x1b[31mb', r'a\x1b[31mb'), ('a\rb', r'a\rb'), ('a\u202eb', r'a\u202eb'),
    ('a\ud800b', r'a\ud800b'), ('a\nb', 'a\nb'), ('Grüße ²', 'Grüße ²')])
def test_control_characters_are_printed_escaped(text, expected, capsys):
  output.complain(text)
  output.say(text)
  assert capsys.readouterr() == (f'{expected}\n', f'{expected}\n')
  stream = io.StringIO()
  console = Console(file=stream, soft_wrap=True)
  progress = Progress(prepared(small()).experiment, f'[red]{text}', console)
  progress.note(text)
  assert stream.getvalue() == f'{expected}\n'
  assert progress._block().title.plain == f'[red]{expected}'  # noqa: SLF001


def test_a_shortened_text_is_escaped_on_one_line():
  assert options.shorten('a\n\x1b[1m\t b') == r'a \x1b[1m b'
  assert options.shorten('x' * 300).isprintable()


def test_a_part_of_another_main_program_is_refused_in_one_line(strange, tmp_path):
  workdir = strange('loss', 'name')
  record = json.loads((workdir / 'config.json').read_text())
  record['config']['loss']['name'] = '__main__:Mine'
  (workdir / 'config.json').write_text(json.dumps(record))
  with pytest.raises(ValueError, match=r"names loss.name of the program that trained.*allow_mod"):
    Workdir(workdir).config()


@pytest.mark.parametrize('allow', [[], ['{folder}/evil.py']])
def test_a_file_that_registers_environments_is_run_if_it_is_allowed(
    allow, strange, tmp_path, monkeypatch, capsys):
  """The file lies in the current folder, and beside the workdir."""
  workdir = strange('env', 'task')
  record = json.loads((workdir / 'config.json').read_text())
  record['config']['env']['task'] = 'gymnasium:Evil-v0'
  (workdir / 'config.json').write_text(json.dumps(record))
  monkeypatch.chdir(tmp_path)
  flags = [f'--allow_modules={path.format(folder=tmp_path)}' for path in allow]
  assert evaluate.main(['podracer_jit', f'--workdir={workdir}', *flags]) == 2
  error = capsys.readouterr().err
  assert 'gymnasium:MODULE:Evil-v0' in error and error.count('\n') == 1
  assert (tmp_path / 'ran').exists() == bool(allow)


def test_a_file_of_a_package_is_allowed_by_both_of_its_names(tmp_path):
  (tmp_path / 'own_package').mkdir()
  (tmp_path / 'own_package' / '__init__.py').write_text('')
  (tmp_path / 'own_package' / 'own_net.py').write_text('X = 1\n')
  assert modules.allowed([tmp_path / 'own_package' / 'own_net.py']) == {
      'own_net', 'own_package.own_net'}
  assert parts.find('x', 'own_package.own_net:X', {}) == 1
  for name in ('own_package.own_net', 'own_package'):
    del sys.modules[name]
