"""The ten tasks of docs/tasks.md, run one after another as written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podracer_jit.workdir import checkpoints, journal, record
from tests import processes
from tests.runs import QUICK

PAGE = Path(__file__).parent.parent / 'docs' / 'tasks.md'
SECTIONS = {int(number): text for number, text in re.findall(
    r'^## (\d+)\. .*?\n(.*?)(?=^## |\Z)', PAGE.read_text(), re.MULTILINE | re.DOTALL)}

# The test trains for less time than a user would.
SHORTER = {
    'sleep 10': 'until [ -s runs/long/metrics.jsonl ]; do sleep 0.1; done',
    '3_000_000': '150_000', '3_500_000': '180_000', 'total_steps=200_000': 'total_steps=20_000',
    '--workdir=runs/pole \\\n': '--workdir=runs/pole --config.total_steps=150_000 \\\n',
    '=mine:Torso': '=mine:Torso --config.total_steps=150_000'}
# Tasks whose shell waits for the command, stops it or sets its variables.
BY_SHELL = (3, 10)
# In other tasks the shell only writes down the words of each command.
WRITE_DOWN = 'podracer_jit() { printf "%s\\n" "$@" --- >> commands.txt; }\n'


def blocks(number, language):
  return re.findall(rf'```{language}\n(.*?)```', SECTIONS[number], re.DOTALL)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Makes the folder of all tasks, with the command `podracer_jit`."""
  folder = tmp_path_factory.mktemp('tasks')
  command = folder / 'bin' / 'podracer_jit'
  command.parent.mkdir()
  command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m podracer_jit "$@"\n')
  command.chmod(0o755)
  return folder


@pytest.fixture
def do(folder):
  """Returns a function that runs the code of a task and returns its output."""
  def run(number, language='sh'):
    text, = blocks(number, language)
    for written, shorter in SHORTER.items():
      text = text.replace(written, shorter)
    if language == 'python':
      return output_of(processes.run([sys.executable, '-P', '-c', text], cwd=folder, timeout=400))
    if number not in BY_SHELL:
      text = WRITE_DOWN + text
    env = QUICK | {'PATH': f'{folder / "bin"}{os.pathsep}{os.environ["PATH"]}'}
    output = output_of(subprocess.run(
        ['bash', '-euc', text], cwd=folder, env=env, capture_output=True, text=True, timeout=400,
        check=False))
    commands = folder / 'commands.txt'
    if commands.exists():
      for words in commands.read_text().split('---\n')[:-1]:
        command = processes.command(*words.splitlines())
        output += output_of(processes.run(command, cwd=folder, timeout=400))
      commands.unlink()
    return output
  return run


def output_of(done):
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout + done.stderr


@pytest.mark.full
def test_the_ten_tasks(do, folder):
  """Later tasks use the runs of earlier tasks."""
  assert 'finished at update' in do(1)
  evaluations = journal.read_lines(folder / 'runs/pole/evaluations.jsonl')
  assert evaluations[-1]['mean'] > 300  # random play: 22

  watched = do(2).splitlines()
  assert json.loads(watched[0])['episode_return'] > 300
  assert json.loads(watched[1]) == evaluations[-1]
  assert 'runs/pole.mp4: an episode of return' in watched[-1]
  assert (folder / 'runs/pole.mp4').stat().st_size > 1000

  long = folder / 'runs/long'
  assert 'stopped with exit code 3' in do(3)
  stopped = checkpoints.newest_whole(long)
  assert f'going on from update {stopped} ' in do(4)
  assert len(journal.read_receipts(long).by_update) > stopped

  assert 'changed before update' in do(5)
  assert journal.read_lines(long / 'metrics.jsonl')[-1]['steps'] >= 180_000
  assert record.read(long).changes

  assert re.search(r'begins with parameters, .*runs/pole after update \d+', do(6))

  output = do(7)
  first, best = re.findall(r'after update ([\d,]+) ', output)
  means = {f'{record["update"]:,}': record['mean'] for record in evaluations}
  assert first == f'{evaluations[-1]["update"]:,}' and means[best] == max(means.values())
  assert 'greedy actions' in output and 'sampled actions' in output

  assert float(re.search(r'return: (\S+)', do(8, 'python'))[1]) > 100

  do(9)
  assert {path.suffix for path in (folder / 'runs/exported').iterdir()} >= {
      '.safetensors', '.json'}

  module, = blocks(10, 'python')
  (folder / 'mine.py').write_text(module)
  output = do(10)
  assert 'finished at update' in output
  assert float(re.search(r'return  (\S+)', output)[1]) > 100
