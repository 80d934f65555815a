"""Whole runs of one or two processes on other cores and devices have the same receipts.

Batches are large enough for XLA to split sums between threads. With small batches any two runs
would be equal.
"""

import functools
import json
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import pytest

from tests.tiers import essential

pytestmark = pytest.mark.as_shipped

ROOT = Path(__file__).parents[2]
COMMON = ['--config.num_shards=2', '--config.num_grad_shards=4', '--config.log.tensorboard=False',
          '--config.placement.env_threads=1']
CASES = {
    # The minibatch of a group has 2,048 rows.
    'mlp': ['--config=configs/ppo_cartpole.py', '--config.scheme=sync',
            '--config.env.num_envs=64', '--config.unroll_length=256',
            '--config.num_minibatches=2', '--config.num_epochs=1',
            '--config.total_steps=48000', '--config.placement.xla_threads=16'],
    # A group has 8 sequences of 81 frames.
    'cnn': ['--config=configs/impala_atari.py:nature_cnn', '--config.env.task=Pong-v5',
            '--config.env.img_height=42', '--config.env.img_width=42', '--config.env.num_envs=32',
            '--config.unroll_length=80', '--config.num_minibatches=1',
            '--config.network.channels=(8,16)', '--config.network.kernels=(8,3)',
            '--config.network.strides=(4,1)', '--config.network.hidden=256',
            '--config.total_steps=5000']}
PLACES = {
    'one core': (['taskset', '-c', '0'], 1, (0,), (0,)),
    'eight virtual devices, four learners': ([], 1, (5, 6), (0, 2, 4, 7)),
    'two processes': ([], 2, (0,), (0, 1))}


@pytest.fixture(scope='module')
def receipts(tmp_path_factory):
  """Returns a function that gives the receipts of a case in a place; it runs each once."""
  tmp_path_factory.getbasetemp()  # made before there are threads: two would both create it
  return functools.cache(lambda *args: _receipts(tmp_path_factory.mktemp('run'), *args))


def _receipts(workdir, case, place, *flags):
  prefix, processes, actors, learners = PLACES[place]
  program = ['-m', 'podracer_jit']
  if processes > 1:
    program += ['launch', '-n', str(processes), '--']
  result = subprocess.run(
      [*prefix, sys.executable, *program, *CASES[case], *COMMON, f'--workdir={workdir}',
       f'--config.placement.actor_devices={actors}',
       f'--config.placement.learner_devices={learners}', *flags],
      capture_output=True, text=True, timeout=300, check=False)
  assert result.returncode == 0, result.stdout + result.stderr
  lines = map(json.loads, (workdir / 'receipts.jsonl').read_text().splitlines())
  return [(x['batch'], x['params']) if 'update' in x else x['canary'] for x in lines]


@pytest.mark.parametrize('case', essential(CASES, 'mlp'))
@pytest.mark.same_bits('one core or two, 1 to 8 virtual devices, 1 process and 2, large batches',
                       'IMPALA: CNN (`cleanba`), PPO: MLP (`sync`, `fused`)')
def test_the_same_bits_in_any_surroundings(case, receipts):
  runs = [(place,) for place in PLACES]
  if 'sync' in CASES[case][1]:
    runs.append(('one core', '--config.scheme=fused'))
  with futures.ThreadPoolExecutor(2) as threads:
    receipts_of = dict(zip(runs, threads.map(lambda run: receipts(case, *run), runs), strict=True))
  expected = receipts_of['one core',]
  assert len(expected) >= 1 + 2  # the canary and two updates
  for place, actual in receipts_of.items():
    assert actual == expected, place


@pytest.mark.full
@pytest.mark.same_bits('16, 9, 4 and 2 XLA threads', 'PPO: MLP (`sync`)')
def test_the_size_of_the_thread_pool_changes_neither_bits_nor_canary(receipts):
  sixteen, *others = (receipts('mlp', 'one core', f'--config.placement.xla_threads={threads}')
                      for threads in (16, 9, 4, 2))
  assert all(other == sixteen for other in others)
