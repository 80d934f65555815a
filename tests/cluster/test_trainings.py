"""Whole runs on simulated machines: processes, machines and drivers that die, and code that fails.

The driver is a process of its own. Its actors are processes on nodes of a real Ray cluster.
"""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from podracer_jit.errors import FAILED, FINISHED, INTERRUPTED, STOPPED
from podracer_jit.workdir import checkpoints, journal
from tests import processes
from tests.ray_nodes import Nodes, is_ours

pytest.importorskip('ray')

PROGRAM = ('import os, sys; os.environ |= {variables!r}; from podracer_jit.cli import main; '
           'sys.argv[0] = "podracer_jit"; main.run()')
ENDLESS = ('--config.total_steps=100000000', '--config.optimizer.anneal=False')
CATCH = ('--config=impala_catch', '--config.scheme=impala', '--config.num_shards=2',
         '--config.placement.actors_per_device=2', '--config.num_minibatches=1')
APEX = ('--config=apex_dqn_catch', '--config.scheme=apex', '--config.num_shards=2',
        '--config.num_grad_shards=2', '--config.placement.actors_per_device=2')
WORKERS = ('--config=impala_catch', '--config.num_shards=2', '--config.num_grad_shards=2',
           '--config.placement.learner_devices=(0,0)', '--config.placement.actor_devices=(0,0)')


@pytest.fixture(scope='module')
def nodes():
  with Nodes() as nodes:
    yield nodes


class Run:
  """A training whose actors are on the nodes."""

  def __init__(self, nodes, workdir, *args, **variables):
    program = PROGRAM.format(variables=nodes.variables | variables)
    self.workdir = workdir
    self._output = (workdir.parent / f'{workdir.name}.txt').open('w+')
    self.process = processes.Popen(
        [sys.executable, '-c', program, '--config.placement.cluster=ray',
         '--config.log.tensorboard=False', f'--workdir={workdir}', *args],
        stdout=self._output, stderr=subprocess.STDOUT, text=True)

  def records(self):
    path = self.workdir / journal.METRICS
    return journal.read_lines(path) if path.exists() else []

  def text(self):
    self._output.flush()
    return (self.workdir.parent / f'{self.workdir.name}.txt').read_text()

  def wait_until(self, condition, seconds=500):
    deadline = time.monotonic() + seconds
    while not condition():
      assert self.process.poll() is None, self.text()
      assert time.monotonic() < deadline, self.text()
      time.sleep(0.05)

  def wait_for_updates(self, more=5):
    last = len(self.records()) + more
    self.wait_until(lambda: len(self.records()) >= last)

  def end(self, number):
    """Ends the run by a signal; returns the seconds that this took."""
    since = time.monotonic()
    self.process.send_signal(number)
    self.process.wait(timeout=60)
    return time.monotonic() - since


@pytest.fixture
def start(nodes, tmp_path):
  runs = []

  def start(*args, workdir='run', **variables):
    runs.append(Run(nodes, tmp_path / workdir, *args, **variables))
    return runs[-1]

  yield start
  for run in runs:
    run.process.kill()
    run.process.wait()


def all_processes():
  """Returns the processes of runs on all nodes."""
  return [process for process in psutil.process_iter() if is_ours(process)]


def wait_until_gone(running):
  _, alive = psutil.wait_procs(running, timeout=20)
  assert not alive


def lives_in(workdir):
  """Returns the lives of actors in the last receipt that has them."""
  lives = {}
  for line in journal.read_lines(workdir / journal.RECEIPTS):
    lives = line.get('lives', lives)
  return lives


@pytest.mark.quick
def test_impala_continues_while_processes_and_machines_die_and_join(nodes, start):
  first = nodes.add(1)
  second = nodes.add(1)
  run = start(*CATCH, *ENDLESS, '--config.env.renew_every_updates=50')
  run.wait_for_updates()
  assert len(nodes.processes(first)) == len(nodes.processes(second)) == 1

  # A process dies.
  (victim,) = nodes.processes(first)
  victim.kill()
  run.wait_until(lambda: sum(lives_in(run.workdir).values()) >= 1)
  run.wait_until(lambda: run.records()[-1]['actors_alive'] == 2)
  # A machine dies, and the other one continues alone. Then a third machine joins.
  nodes.remove(second)
  run.wait_until(lambda: run.records()[-1]['actors_pending'] == 1)
  run.wait_for_updates()
  third = nodes.add(1)
  run.wait_until(lambda: run.records()[-1]['actors_alive'] == 2)
  assert len(nodes.processes(third)) == 1
  # At least one process for each death. Ray may also begin one on the second machine before it
  # notices the death, which is one more; how often depends on the speed of this machine. Receipts
  # and metrics agree, whatever the number.
  run.wait_until(lambda: run.records()[-1]['actor_restarts'] >= 2)
  run.wait_until(lambda: sum(lives_in(run.workdir).values())
                 == run.records()[-1]['actor_restarts'])

  # Ctrl-C, while calls are under way.
  running = nodes.processes(first) + nodes.processes(third)
  assert run.end(signal.SIGINT) < 10
  assert run.process.returncode == STOPPED, run.text()
  wait_until_gone(running)
  done = checkpoints.newest_whole(run.workdir)
  assert done == run.records()[-1]['update']
  assert journal.read_receipts(run.workdir).problems == []

  for node in (first, third):
    nodes.remove(node)

  # The same experiment resumes with threads in place of processes.
  resumed = processes.Popen([sys.executable, '-m', 'podracer_jit', *CATCH, *ENDLESS,
                           '--config.env.renew_every_updates=50', '--config.log.tensorboard=False',
                           f'--workdir={run.workdir}'])
  try:
    deadline = time.monotonic() + 500
    while run.records()[-1]['update'] < done + 5:
      assert resumed.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
    resumed.send_signal(signal.SIGINT)
    assert resumed.wait(timeout=60) == STOPPED
  finally:
    resumed.kill()
    resumed.wait()


def test_a_run_without_a_machine_waits_and_stops(start):
  run = start(*CATCH, *ENDLESS)
  run.wait_until(lambda: 'compiling ...' in run.text())
  time.sleep(2)
  assert run.end(signal.SIGINT) < 10
  assert run.process.returncode == INTERRUPTED, run.text()
  assert 'stopped at update 0 (0 steps)' in run.text()


@pytest.mark.full
def test_apex_learns_on_while_a_machine_is_gone(nodes, start):
  first = nodes.add(1)
  second = nodes.add(1)
  run = start(*APEX, *ENDLESS)
  run.wait_until(lambda: run.records() and run.records()[-1].get('sampled', 1)
                 and run.records()[-1]['actors_alive'] == 2)
  run.wait_for_updates()
  nodes.remove(second)
  run.wait_until(lambda: run.records()[-1]['actors_alive'] == 1)
  before = run.records()[-1]['replay_size']
  run.wait_for_updates(20)
  assert run.records()[-1]['replay_size'] >= before
  running = nodes.processes(first)
  assert run.end(signal.SIGTERM) < 10
  assert run.process.returncode == STOPPED, run.text()
  wait_until_gone(running)
  nodes.remove(first)


@pytest.mark.full
@pytest.mark.parametrize('scheme, cpus', [('dppo_async', 1), ('rapid_async', 2)])
def test_remote_gradients_survive_the_loss_of_a_process_and_a_machine(nodes, start, scheme, cpus):
  first = nodes.add(cpus)
  second = nodes.add(cpus)
  run = start(*WORKERS, *ENDLESS, f'--config.scheme={scheme}')
  run.wait_until(lambda: run.records() and run.records()[-1]['actors_alive'] == 2 * cpus)
  run.wait_for_updates()
  assert len(nodes.processes(first)) == len(nodes.processes(second)) == cpus
  # With two workers, one other gradient is applied while a worker computes its own.
  run.wait_until(lambda: any(record['gud'] > 0 for record in run.records()))
  nodes.processes(first)[-1].kill()
  run.wait_until(lambda: run.records()[-1]['actor_restarts'] >= 1
                 and run.records()[-1]['actors_alive'] == 2 * cpus)
  run.wait_for_updates()
  nodes.remove(second)
  run.wait_until(lambda: run.records()[-1]['actors_pending'] > 0)
  run.wait_for_updates()
  third = nodes.add(cpus)
  # The death of an idle process is noticed with its next call.
  run.wait_until(lambda: run.records()[-1]['actors_alive'] == 2 * cpus
                 and run.records()[-1]['actor_restarts'] >= 1 + cpus)
  run.wait_for_updates()
  # A killed driver leaves no process behind.
  run.wait_until(
      lambda: len(nodes.processes(first) + nodes.processes(third)) == 2 * cpus)
  running = nodes.processes(first) + nodes.processes(third)
  run.process.kill()
  wait_until_gone(running)
  for node in (first, third):
    nodes.remove(node)


OWN = '''
import os, sys, time
import gymnasium, numpy as np
from podracer_jit import experiment

class Task(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
  action_space = gymnasium.spaces.Discrete(2)
  def __init__(self, mode='works'):
    self.mode = mode
    self.t = 0
  def reset(self, seed=None, options=None):
    self.pause_s = 1.5 if self.mode == 'slow' else 0.0
    if self.mode == 'raises':
      raise ValueError('the option mode must be works')
    if self.mode == 'dies':
      print('no memory for the sprites', file=sys.stderr, flush=True)
      os.kill(os.getppid(), 9)
      time.sleep(10)
    self.t = 0
    return np.zeros(3, np.float32), {}
  def step(self, action):
    self.t += 1
    time.sleep(self.pause_s)
    return np.zeros(3, np.float32), 1.0, self.t == 5, False, {}

def get_config():
  config = experiment.config('impala', 'mlp', 'adam', scheme='impala')
  config.env.task = 'own:Task'
  config.env.num_envs = 4
  config.unroll_length = 5
  config.total_steps = 200
  config.placement.xla_threads = 2
  config.env.mode = 'works'
  return config
'''


@pytest.mark.full
def test_a_signal_saves_what_was_learned_although_the_next_rollout_takes_long(
    nodes, start, tmp_path):
  """A rollout takes 7.5 s, and the learner waits four."""
  node = nodes.add(2)
  (tmp_path / 'own.py').write_text(OWN)
  run = start(f'--config={tmp_path / "own.py"}', '--config.env.mode=slow',
              '--config.checkpoint.every_seconds=10000', '--config.eval.every_updates=0')
  run.wait_for_updates(2)
  assert run.end(signal.SIGTERM) < 30
  assert run.process.returncode == STOPPED, run.text()
  assert checkpoints.newest_whole(run.workdir) == run.records()[-1]['update']
  nodes.remove(node)


@pytest.mark.full
def test_code_is_shipped_and_runs_on_one_cluster_do_not_mix(nodes, start, tmp_path):
  node = nodes.add(2)
  (tmp_path / 'own.py').write_text(OWN)
  config = f'--config={tmp_path / "own.py"}'
  runs = [start(config, workdir='first'), start(config, '--config.seed=2', workdir='second')]
  for run in runs:
    assert run.process.wait(timeout=500) == FINISHED, run.text()
    assert run.records()[-1]['steps'] >= 200
    assert {record['actors_alive'] for record in run.records()} == {1}
  batches = [{receipt['batch'] for receipt in journal.read_receipts(run.workdir).by_update.values()}
             for run in runs]
  assert not batches[0] & batches[1]

  # An exception in a process ends the run, and so does a process that dies repeatedly.
  runs = [start(config, f'--config.env.mode={mode}', workdir=mode) for mode in ('raises', 'dies')]
  for run, message in zip(runs, (r'the option mode must be works', 'no memory for the sprites'),
                          strict=True):
    assert run.process.wait(timeout=500) == FAILED, run.text()
    last = run.text().splitlines()[-1]
    assert last.startswith('podracer_jit: actor 0') and message in last, run.text()
  assert 'its process died 3 times in a row' in last
  nodes.remove(node)
