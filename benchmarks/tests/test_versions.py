"""scripts/versions: its plan, its table, its exit codes; with a Python that only pretends."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.versions import Pair
from podracer_jit.runtime import tried

# Makes "virtual environments" of itself, and answers as pip, trainings, compare and pytest do.
FAKE = '''#!/usr/bin/env bash
echo "$*" >> {calls}
case "$*" in
  *'ensurepip; print'*) echo 3.12 ;;
  '-m venv'*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  '-m pip check') echo 'gymnax 1.0.1 has requirement jax<0.12, but you have jax 0.12.0.'; exit 1 ;;
  *importlib.metadata*) echo '{"python": "3.12.9", "envpool": "1.2.5", "numpy": "2"}' ;;
  *' compare '*) echo 'identical: 7 updates, batches and parameters' ;;
  *'-m pytest'*) echo '37 passed, 2 skipped in 9.99s'; exit {tests} ;;
esac
'''


def test_the_plan_has_all_pairs_or_those_that_are_named():
  pairs = versions.plan()
  assert len(pairs) == len(set(pairs)) == sum(map(len, tried.JAX.values()))
  assert pairs[0] == ('3.11', '0.10.2')
  assert versions.plan(['3.12'], ['0.99']) == [('3.12', '0.99')]
  assert versions.plan(versions=['0.99']) == [(python, '0.99') for python in tried.JAX]
  with pytest.raises(ValueError, match='^--pythons: must be of 3.11, 3.12, 3.13, got 3.9$'):
    versions.plan(['3.9'])


def test_packages_are_those_of_the_lock_but_for_jax_and_an_older_envpool_where_it_needs_one():
  lock = ('# of 3.12\nenvpool==1.2.7\nenvpool-assets==0.4.1\njax==0.11.2\njaxlib==0.11.2\n'
          'jaxopt==0.8.5')
  older = '# of 3.11\nenvpool==1.2.5\nenvpool-assets==0.3.0\njax==0.10.2\njaxopt==0.8.4\n'
  assert versions.pins(lock, '0.12.0', older) == [
      'envpool==1.2.7', 'envpool-assets==0.4.1', 'jaxopt==0.8.5', 'jax==0.12.0', 'jaxlib==0.12.0']
  assert versions.pins(lock, '0.10.2', older) == [
      'jaxopt==0.8.5', 'envpool==1.2.5', 'envpool-assets==0.3.0', 'jax==0.10.2', 'jaxlib==0.10.2']


@pytest.fixture
def fake(tmp_path, monkeypatch):
  """Returns a function that sets the only interpreter, python3.12, and returns the calls so far."""
  calls = tmp_path / 'calls'
  python = tmp_path / 'bin' / 'python3.12'
  python.parent.mkdir()
  monkeypatch.setenv('PATH', f'{python.parent}{os.pathsep}{os.environ["PATH"]}')
  monkeypatch.setenv('PYENV_ROOT', str(tmp_path))

  def make(tests=0):
    python.write_text(FAKE.replace('{calls}', str(calls)).replace('{tests}', str(tests)))
    python.chmod(0o755)
    done = calls.read_text().splitlines() if calls.exists() else []
    calls.write_text('')
    return done
  make()
  monkeypatch.setattr(versions, 'commit', lambda: 'abc')
  return make


def test_a_pair_is_tried_once_and_again_after_a_failure(fake, tmp_path, capsys):
  command = [f'--folder={tmp_path}/out', '--pythons=3.12', '--jax=0.12.0']
  fake(tests=1)
  assert versions.main(command) == 1
  out = capsys.readouterr().out
  log = tmp_path / 'out' / 'py3.12-jax0.12.0' / 'quick.log'
  assert f'Python 3.12, jax 0.12.0: quick failed (37 passed, 2 skipped in 9.99s); see {log}' in out

  assert any('pytest' in call for call in fake())
  # The virtual environment has the Python that it was made from, so this one stays as it is.
  python = tmp_path / 'out' / 'py3.12-jax0.12.0' / 'venv' / 'bin' / 'python'
  python.write_text(python.read_text().replace('exit 1 ;;\nesac', 'exit 0 ;;\nesac'))
  assert versions.main(command) == 0
  out = capsys.readouterr().out.splitlines()
  assert out[0] == '| python | jax | ' + ' | '.join([*versions.NAMED, *versions.CONFIGS, 'quick |'])
  assert out[2] == ('| 3.12.9 | 0.12.0 | 1.2.5 | - | - | 2 | 7 updates | 7 updates | 7 updates | '
                    '37 passed, 2 skipped |')
  assert out[-1] == 'Python 3.12, jax 0.12.0: gymnax 1.0.1 has requirement jax<0.12'
  calls = fake()
  assert not any('pip install' in call or '-m venv' in call for call in calls)
  trainings = [call for call in calls if ':smoke' in call]
  assert len(trainings) == 6 and sum('xla_threads' in call for call in trainings) == 3

  assert versions.main(command) == 0
  assert capsys.readouterr().out.splitlines() == out and not fake()


def test_a_step_that_does_not_end_has_failed(fake, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(versions, 'LIMIT_S', 1.0)
  python = tmp_path / 'bin' / 'python3.12'
  python.write_text(python.read_text().replace("echo 'identical", "echo begun; sleep 60; echo '"))
  assert versions.main([f'--folder={tmp_path}/out', '--pythons=3.12', '--jax=0.12.0']) == 1
  log = tmp_path / 'out' / 'py3.12-jax0.12.0' / 'impala_catch-compare.log'
  assert (f'Python 3.12, jax 0.12.0: impala_catch-compare did not end in 1 s; see {log}'
          in capsys.readouterr().out)
  assert log.read_text() == 'begun\n'


def test_a_missing_interpreter_is_named_and_has_not_passed(fake, tmp_path, capsys):
  (tmp_path / 'versions' / '3.13.5' / 'bin').mkdir(parents=True)
  broken = tmp_path / 'bin' / 'python3.13'  # as pyenv has it if another version is chosen
  broken.write_text('#!/bin/sh\nexit 127\n')
  broken.chmod(0o755)
  assert versions.main([f'--folder={tmp_path}/out', '--pythons=3.13', '--jax=0.12.0']) == 1
  out = capsys.readouterr().out
  assert (f'Python 3.13, jax 0.12.0: no interpreter: none of python3.13, {tmp_path}/versions/3.13.5'
          '/bin/python is a Python 3.13 with venv and ensurepip') in out
  assert not (tmp_path / 'out' / versions.RESULTS).exists()


def test_results_of_other_commits_do_not_count(tmp_path):
  lines = [dict(pair=['3.12', '0.12.0'], commit=at, result=result) for at, result in (
      ('old', {'quick': '1 passed'}), ('new', {'failed': 'no'}))]
  (tmp_path / versions.RESULTS).write_text(''.join(json.dumps(line) + '\n' for line in lines))
  assert versions.passed_before(tmp_path, 'new') == {}
  assert versions.passed_before(tmp_path, 'old') == {Pair('3.12', '0.12.0'): {'quick': '1 passed'}}


def test_the_script_runs_without_the_packages_of_a_virtual_environment():
  script = Path(versions.__file__).parents[1] / 'scripts' / 'versions'
  done = subprocess.run([script, '--help'], capture_output=True, text=True, timeout=60, check=True,
                        env={'PATH': os.environ['PATH'], 'HOME': '/nonexistent'})
  assert 'scripts/versions --folder=/tmp/versions' in done.stdout
