"""The programs in the docs run, and every config; `tests.lint` checks what the docs name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import extras, processes
from tests.runs import QUICK
from tests.tiers import essential

ROOT = Path(__file__).parent.parent


def blocks(path, language):
  return re.findall(rf'```{language}\n(.*?)```', path.read_text(), re.DOTALL)


def test_the_readmes_program(tmp_path):
  (program,) = blocks(ROOT / 'README.md', 'python')
  result = processes.run([sys.executable, '-c', program + 'print(int(action))'], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  mean, action = re.findall(r'mean return of 20 episodes: (.*)\n(.*)', result.stdout)[-1]
  assert float(mean) > 100  # random play: 22
  assert action in '01'


def test_the_readme_is_short():
  assert len((ROOT / 'README.md').read_text().split()) <= 900


def test_the_program_that_trains_from_python(tmp_path):
  (program,) = [block for block in blocks(ROOT / 'docs' / 'python.md', 'python')
                if 'pj.train(' in block]
  result = processes.run([sys.executable, '-c', program], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert 'stopped at update' in result.stdout  # by the callback
  assert float(result.stdout.split()[-1]) > 100  # random play: 22
  assert (tmp_path / 'runs' / 'agent' / 'parameters.safetensors').is_file()


def test_the_config_that_is_shown_is_that_of_the_package():
  (shown,) = blocks(ROOT / 'docs' / 'configs.md', 'python')
  shown = [line.partition('  #')[0] for line in shown.splitlines() if line]
  file = (ROOT / 'podracer_jit' / 'configs' / 'impala_catch.py').read_text().splitlines()
  assert shown == [line for line in file[file.index(shown[0]):] if line and '"""' not in line]


def test_the_program_that_reads_a_trace(tmp_path):
  (program,) = blocks(ROOT / 'docs' / 'profiling.md', 'python')
  trained = processes.run([sys.executable, '-m', 'podracer_jit', '--config=impala_catch:smoke',
                           '--workdir=runs/profiled', '--profile_dir=runs/trace'], cwd=tmp_path)
  assert trained.returncode == 0, trained.stderr
  result = processes.run([sys.executable, '-c', program], cwd=tmp_path)
  threads = {}
  for line in result.stdout.splitlines():
    number, region = re.fullmatch(r' *(\d+) (.*?) +\d+ x +[\d.]+ ms', line).groups()
    threads.setdefault(number, set()).add(region)
  assert any({'rollout', 'make: rollouts of actor 0'} <= regions for regions in threads.values())
  assert any({'learn', 'make: parameters for actor 0'} <= regions for regions in threads.values())


@pytest.mark.full
def test_the_commands_for_the_life_of_a_run(tmp_path):
  """Runs the commands of the page in their order."""
  text = (ROOT / 'docs' / 'runs.md').read_text().partition('## The life of a run')[2]
  block = re.search(r'```sh\n(.*?)```', text, re.DOTALL)[1]
  # The shell prints the commands instead of running them.
  lines = subprocess.run(['bash', '-euc', block.replace('scripts/train', 'echo')],
                         capture_output=True, text=True, check=True).stdout.splitlines()
  assert len(lines) == block.count('scripts/train') == 5
  output = ''
  for line in lines:
    result = processes.run(processes.command(*line.split()), cwd=tmp_path)
    # `compare` is the one command that may fail, since the two runs differ.
    assert result.returncode == 0 or line.startswith('compare '), result.stderr
    output += result.stdout + result.stderr
  for message in ('changed before update 10: total_steps: 5000 before, 8000 since',
                  'its schedule is over 8,000 steps instead of 5,000',
                  'changed before update 15: optimizer.learning_rate: 0.001 before, 0.0001 since',
                  'the run begins with parameters, optimizer of', 'history: B began with'):
    assert message in output, message


@pytest.mark.parametrize('page, outputs', essential(
    [('devices', ['finished at update']), ('reproduce', ['identical: ']),
     ('where_runs_part', ['optimizer.learning_rate: 0.001 in A, 0.0001 in B',
                         'differ at update 1: the batch is the same and the parameters differ',
                         'update_2.npz: the rollout of update 2'])],
    'reproduce'))
def test_the_first_commands_of_a_page(page, outputs, tmp_path):
  """Runs the page's first block, with the command in place of scripts/train."""
  block = blocks(ROOT / 'docs' / f'{page}.md', 'sh')[0]
  (tmp_path / 'scripts').mkdir()
  command = tmp_path / 'scripts' / 'train'
  command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m podracer_jit "$@"\n')
  command.chmod(0o755)
  result = subprocess.run(['bash', '-euc', block], cwd=tmp_path, capture_output=True, text=True,
                          timeout=600, env=QUICK | {'PYTHONPATH': str(ROOT)}, check=False)
  assert result.returncode == 0, result.stdout + result.stderr
  for output in outputs:
    assert output in result.stdout + result.stderr


@pytest.mark.parametrize('name', essential(
    sorted(p.stem for p in (ROOT / 'podracer_jit' / 'configs').glob('[!_]*.py')),
    'impala_catch', 'apex_dqn_catch', 'ppo_mujoco'))
def test_every_config_makes_its_smoke_run(name, tmp_path):
  extras.skip_without(name)
  result = processes.run(processes.command(
      f'--config=configs/{name}.py:smoke', f'--workdir={tmp_path}/run'))
  assert result.returncode == 0, result.stderr
  assert 'finished at update' in result.stdout
