"""A stranger's workdir is data: nothing in it is imported or executed."""

import contextlib
import json
import subprocess
import sys

import pytest

from podracer_jit import parts
from podracer_jit.run import checkpoint, config, workdirs
from podracer_jit.run.commands import compare, evaluate, rerun, train
from podracer_jit.runtime import host
from tests.runs import QUICK, prepared, small

FIELDS = [('loss', 'name'), ('network', 'name'), ('optimizer', 'name'), ('env', 'task'),
          ('scheme', None), ('policy', None)]


@pytest.fixture
def strange(tmp_path, monkeypatch):
  """Returns a function that makes a workdir whose config names a module.

  The module creates the file `ran` when it is imported.
  """
  monkeypatch.setattr(host, 'prepare_host', lambda options: None)
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


def test_a_file_that_is_allowed_must_exist(tmp_path):
  with pytest.raises(ValueError, match='--allow_modules: there is no file'):
    config.allowed_modules([f'{tmp_path}/mine.py'])


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
from podracer_jit.run.main import main
sys.exit(main(['podracer_jit', 'evaluate', f'--workdir={workdir}', '--num_episodes=2']))
'''


def test_an_evaluation_unpickles_nothing_of_a_workdir(tmp_path):
  run = prepared(small(task='Catch-v0'))
  workdirs.open_workdir(tmp_path, run.experiment.fields)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    saved.save(run.initial_state()._replace(update=run.initial_state().update + 1), {})
  done = subprocess.run([sys.executable, '-P', '-c', WATCHED, tmp_path], capture_output=True,
                        text=True, timeout=300, env=QUICK, check=False)
  assert done.returncode == 0, done.stderr
  assert '2 episodes' in done.stdout


def test_a_part_of_another_main_program_is_refused_in_one_line(strange, tmp_path):
  workdir = strange('loss', 'name')
  record = json.loads((workdir / 'config.json').read_text())
  record['config']['loss']['name'] = '__main__:Mine'
  (workdir / 'config.json').write_text(json.dumps(record))
  with pytest.raises(ValueError, match=r"names loss.name of the program that trained.*allow_mod"):
    workdirs.read_config(workdir)


@pytest.mark.parametrize('allow', [[], ['{folder}/evil.py']])
def test_a_file_that_registers_environments_is_run_if_it_is_allowed(
    allow, strange, tmp_path, monkeypatch, capsys):
  """It lies in the current folder, and beside the workdir."""
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
  assert config.allowed_modules([tmp_path / 'own_package' / 'own_net.py']) == {
      'own_net', 'own_package.own_net'}
  assert parts.find('x', 'own_package.own_net:X', {}) == 1
  for name in ('own_package.own_net', 'own_package'):
    del sys.modules[name]
