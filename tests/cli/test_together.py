"""Runs of several processes, and the commands compare and rerun; with real signals."""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from podracer_jit.cli import compare, launch, rerun
from podracer_jit.experiment.resolve import resolve
from podracer_jit.workdir import checkpoints, record
from tests import made, processes
from tests.envs.masked import LIMIT
from tests.processes import command
from tests.runs import QUICK, small
from tests.tiers import essential

ROOT = Path(__file__).resolve().parents[2]

CATCH = ['--config=configs/impala_catch.py:smoke', '--config.env.renew_every_updates=5',
         '--config.checkpoint.every_updates=4', '--config.log.tensorboard=False',
         '--config.num_shards=2', '--config.num_grad_shards=2', '--config.total_steps=6000']


def verb(name, *args, timeout=300):
  return processes.run(command(name, *args), timeout=timeout)


def train(workdir, *args, experiment=CATCH):
  return processes.run(command(*experiment, f'--workdir={workdir}', *args))


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  def make(workdir):
    result = train(workdir)
    assert result.returncode == 0, result.stderr
  return made.once(tmp_path_factory, 'alone', make)


def start(workdir, *args, count=2, experiment=CATCH):
  return subprocess.Popen(command('launch', '-n', count, '--', *experiment,
                                  f'--workdir={workdir}', *args),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=QUICK)


def wait_for_updates(process, workdir, count):
  path = workdir / 'metrics.jsonl'
  while not path.exists() or len(path.read_text().splitlines()) < count:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.02)


def workers_of(process):
  """Returns {process_id: pid} of the processes that `launch` started."""
  pids = {}
  for path in Path('/proc').glob('[0-9]*/cmdline'):
    try:
      words = path.read_text().split('\0')
      parent = re.search(r'\) \S (\d+)', (path.parent / 'stat').read_text())[1]
    except OSError:
      continue  # the process has ended meanwhile
    if int(parent) == process.pid:
      pids |= {int(w[-1]): int(path.parent.name) for w in words if w.startswith('--process_id=')}
  return pids


@pytest.mark.same_bits('2 processes and 1', 'IMPALA: MLP (`cleanba`)')
def test_two_processes_make_the_same_bits_as_one(uninterrupted, tmp_path):
  process = start(tmp_path)
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  assert '[0] finished at update' in out and '[1] finished' not in out
  result = verb('compare', uninterrupted, tmp_path)
  assert result.returncode == 0, result.stdout
  assert 'identical: ' in result.stdout and 'round differently' not in result.stdout
  assert [m['episode_return'] for m in lines(tmp_path / 'metrics.jsonl')] == [
      m['episode_return'] for m in lines(uninterrupted / 'metrics.jsonl')]


# A machine whose nodes are the first and the last core that the test may use.
TWO_NODES = """
import os, sys
from podracer_jit.cli import launch
from podracer_jit.runtime import machine
cores = sorted(os.sched_getaffinity(0))
machine.numa_nodes = lambda: [{cores[0]}, {cores[-1]}]
sys.exit(launch.main(['launch', '-n', 'numa', '--', *sys.argv[1:]]))
"""


@pytest.mark.same_bits('a process for each NUMA node and 1', 'IMPALA: MLP (`cleanba`)')
def test_a_process_for_each_numa_node_has_its_cores_and_the_same_bits(uninterrupted, tmp_path):
  process = subprocess.Popen(
      [sys.executable, '-P', '-c', TWO_NODES, *CATCH, f'--workdir={tmp_path}'],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=QUICK)
  wait_for_updates(process, tmp_path, 1)
  cores = {i: os.sched_getaffinity(pid) for i, pid in workers_of(process).items()}
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  allowed = sorted(os.sched_getaffinity(0))
  assert cores == {0: {allowed[0]}, 1: {allowed[-1]}}
  assert 'identical: ' in verb('compare', uninterrupted, tmp_path).stdout


def check_two_as_one(experiment, folder, count=2):
  """Checks that two processes, or `count`, make the bits of one; returns their workdir."""
  of_one, of_two = folder / 'one', folder / 'two'
  result = train(of_one, experiment=experiment)
  assert result.returncode == 0, result.stderr
  results = processes.together(count, *experiment, f'--workdir={of_two}')
  assert 'finished at update' in results[0].stdout, results
  result = verb('compare', of_one, of_two)
  assert 'identical: ' in result.stdout and 'round differently' not in result.stdout
  return of_two


SHORT = ['--config.total_steps=2500', '--config.env.renew_every_updates=8',
         '--config.checkpoint.every_updates=12', '--config.log.tensorboard=False',
         '--config.num_shards=2', '--config.num_grad_shards=2']


@pytest.mark.full
@pytest.mark.parametrize('config', [
    ['apex_dqn_catch.py:smoke'], ['apex_dqn_pong_laptop.py:smoke'],
    ['apex_dpg_cartpole_swingup.py:smoke', '--config.replay.copies=2',
     '--config.replay.evict_every=3', '--config.env.num_envs=8', '--config.unroll_length=8'],
    ['r2d2_memory.py:smoke', '--config.env.num_envs=8'],
    ['sac_pendulum.py:smoke'], ['td3_pendulum.py:smoke'],
    ['pqn_cartpole.py:smoke', '--config.scheme=sync', '--config.env.num_envs=8',
     '--config.unroll_length=8'],
    ['pqn_cartpole.py:smoke', '--config.scheme=sync', '--config.env.num_envs=8',
     '--config.unroll_length=8', '--config.num_minibatches=4', '--config.network.core=gru',
     '--config.network.core_size=16'],
    *([f'{ROOT}/examples/{name}.py:smoke', '--config.scheme=sync', '--config.env.num_envs=8',
       '--config.unroll_length=16'] for name in ('vmpo', 'ppg', 'rnd'))])
@pytest.mark.same_bits('2 processes and 1',
                       'DQN: MLP, CNN, DPG, R2D2: GRU, SAC, TD3 (`apex_lockstep`), PQN: MLP, GRU, '
                       'V-MPO, PPG, RND (`sync`)')
def test_two_processes_of_each_newer_algorithm_make_the_same_bits_as_one(config, tmp_path):
  """One process can also repeat an update of a later segment, and have their replay."""
  name, *fields = config
  path = name if name.startswith('/') else f'configs/{name}'
  of_two = check_two_as_one([f'--config={path}', *fields, *SHORT], tmp_path)
  result = verb('rerun', f'--workdir={of_two}', '--update=20')
  assert result.returncode == 0 and 'as its receipt says' in result.stdout, result.stderr


@pytest.mark.full
@pytest.mark.parametrize('config', [
    ['ppo_cartpole.py', '--config.env.task=tests.envs.masked:PythonDoors',
     '--config.env.choices=(3,4)', '--config.env.form=tuple', '--config.scheme=sync',
     '--config.num_minibatches=2'],
    ['apex_dqn_catch.py:smoke', '--config.env.task=tests.envs.masked:Doors'],
    ['pqn_cartpole.py:smoke', '--config.env.task=tests.envs.masked:Doors',
     '--config.network.core=gru', '--config.network.core_size=8', '--config.scheme=sync',
     '--config.num_minibatches=2']],
    ids=['ppo', 'dqn', 'pqn'])
@pytest.mark.same_bits('2 processes and 1', 'PPO: MLP, PQN: GRU (`sync`), DQN: MLP '
                       '(`apex_lockstep`), with action masks')
def test_two_processes_take_legal_actions(config, tmp_path):
  """An illegal action would end an episode early."""
  name, *fields = config
  of_two = check_two_as_one([f'--config=configs/{name}', *fields, *SHORT,
                             '--config.env.num_envs=8', '--config.unroll_length=16'], tmp_path)
  metrics = lines(of_two / 'metrics.jsonl')
  assert metrics[-1]['episodes'] > 100
  assert {line['episode_length'] for line in metrics} == {LIMIT}


def coordinator_addresses(port):
  """Returns the addresses at which this machine listens on a port, written as in /proc/net."""
  tables = [Path(f'/proc/net/{name}').read_text().splitlines()[1:] for name in ('tcp', 'tcp6')]
  rows = [line.split() for table in tables for line in table]
  return {row[1].rpartition(':')[0] for row in rows
          if row[3] == '0A' and int(row[1].rpartition(':')[2], 16) == port}


def check_address(process):
  """Checks that other machines cannot reach the address that the processes of a launch use."""
  command_line = Path(f'/proc/{workers_of(process)[0]}/cmdline').read_text()
  host, port = re.search(r'--coordinator_address=(\S+?):(\d+)\0', command_line).groups()
  addresses = coordinator_addresses(int(port))
  assert host == '127.0.0.1' and len(addresses) == 1, addresses
  assert addresses <= {'0100007F', '0000000000000000FFFF00000100007F'}  # both are 127.0.0.1


LONG = '--config.total_steps=4000000', '--config.checkpoint.every_updates=0'


@pytest.mark.full
@pytest.mark.same_bits('2 processes stopped by SIGTERM and SIGINT within a segment, resumed by 2 '
                       'and by 1', 'IMPALA: MLP (`cleanba`)')
def test_a_signal_to_one_process_stops_all_at_the_same_update(tmp_path):
  long = *LONG, '--config.env.renew_every_updates=0'
  of_two = tmp_path / 'two'
  process = start(of_two, *long)
  wait_for_updates(process, of_two, 3)
  os.kill(workers_of(process)[1], signal.SIGTERM)  # process 0 writes files, process 1 does not
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 3 and 'the same command goes on' in out, out
  done = lines(of_two / 'metrics.jsonl')[-1]['update']
  of_one = shutil.copytree(of_two, tmp_path / 'one')

  def stopped(workdir, count):
    process = start(workdir, *long, count=count)
    wait_for_updates(process, workdir, done + 2)
    if count > 1:
      check_address(process)
    process.send_signal(signal.SIGINT)  # the launcher passes it on to all
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 3, out
    updates = [x['update'] for x in lines(workdir / 'metrics.jsonl')]
    assert updates == list(range(1, len(updates) + 1))
    return out, {line['update']: line for line in lines(workdir / 'receipts.jsonl')
                 if 'update' in line}

  out, by_two = stopped(of_two, 2)
  assert f'going on from update {done} ' in out
  out, by_one = stopped(of_one, 1)
  assert f'going on from update {done} ' in out
  _, never_stopped_before = stopped(tmp_path / 'never', 1)
  for receipts in (by_two, by_one):
    both = receipts.keys() & never_stopped_before.keys()
    assert len(both) >= done + 2
    assert all(receipts[update] == never_stopped_before[update] for update in both)


def test_a_signal_to_one_process_gives_all_the_exit_code_of_a_stop(tmp_path):
  with processes.start_together(2, *CATCH, f'--workdir={tmp_path}', *LONG) as both:
    wait_for_updates(both[0], tmp_path, 3)
    both[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [3, 3], outputs


@pytest.mark.parametrize('victim', essential([0, 1], 1))
def test_a_process_that_dies_ends_the_others(victim, tmp_path):
  process = start(tmp_path, *LONG)
  wait_for_updates(process, tmp_path, 2)
  started = time.monotonic()
  os.kill(workers_of(process)[victim], signal.SIGKILL)
  out, _ = process.communicate(timeout=120)
  assert time.monotonic() - started < 30
  assert process.returncode == 128 + signal.SIGKILL
  assert f'[{victim}] ended with exit code -9; the others cannot go on' in out


@pytest.mark.full
def test_an_exception_in_one_process_ends_the_others(tmp_path):
  """Process 0 writes the files, which may not be larger than 40 KB."""
  launch_two = command('launch', '-n', '2', '--', *CATCH, f'--workdir={tmp_path}', *LONG)
  result = subprocess.run(['bash', '-c', 'ulimit -f 40; exec "$@"', 'bash', *launch_two], env=QUICK,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                          check=False)
  assert result.returncode == 1
  assert '[0] podracer_jit: [Errno 27] File too large: ' in result.stdout
  assert '[0] ended with exit code 1; the others cannot go on' in result.stdout


def _wait_for_the_end(pids):
  while any(Path(f'/proc/{pid}').exists() for pid in pids):
    time.sleep(0.05)


def test_a_killed_launcher_stops_its_processes_and_one_process_resumes(tmp_path):
  process = start(tmp_path, *LONG)
  wait_for_updates(process, tmp_path, 6)
  workers = workers_of(process)
  process.kill()
  process.communicate(timeout=60)
  _wait_for_the_end(workers.values())
  saved = checkpoints.newest_whole(tmp_path)
  assert saved == len(lines(tmp_path / 'metrics.jsonl')) >= 6  # stopped as by SIGTERM
  result = train(tmp_path, *LONG, '--config.total_steps=1')
  assert result.returncode == 2 and 'total_steps' in result.stderr
  done = start(tmp_path, *LONG, count=1)
  wait_for_updates(done, tmp_path, saved + 1)
  done.send_signal(signal.SIGINT)
  out, _ = done.communicate(timeout=120)
  assert done.returncode == 3 and f'going on from update {saved} ' in out, out


KILLED_SOON = """
import os, signal, sys, time
from podracer_jit.cli import launch
from podracer_jit.runtime import children
prctl = children._LIBC.prctl
class Libc:
  def prctl(self, *args):
    # The launcher is killed after the fork, and before this process asks to be told so.
    launcher = os.getppid()
    os.kill(launcher, signal.SIGKILL)
    while os.getppid() == launcher:
      time.sleep(0.01)
    return prctl(*args)
children._LIBC = Libc()
sys.executable = sys.argv.pop()
launch.main(['launch', '-n', '1', '--', '--config=x'])
"""


def test_a_launcher_that_is_killed_while_it_starts_leaves_no_process(tmp_path):
  program = tmp_path / 'python'
  program.write_text(f'#!/bin/sh\ntouch {tmp_path}/has_begun\n')
  program.chmod(0o755)
  inherited, ours = os.pipe()
  done = subprocess.run([sys.executable, '-P', '-c', KILLED_SOON, str(program)], stdin=inherited,
                        check=False)
  assert done.returncode == -signal.SIGKILL
  os.close(inherited)
  # The processes of the launcher have its input; when all have ended, nobody has.
  poll = select.poll()
  poll.register(ours, 0)
  assert poll.poll(60_000) == [(ours, select.POLLERR)]
  os.close(ours)
  assert not (tmp_path / 'has_begun').exists()


@pytest.mark.full
@pytest.mark.same_bits('2 processes, one frozen, resumed by 1', 'IMPALA: MLP (`cleanba`)')
def test_a_frozen_process_ends_the_run_and_one_process_resumes(uninterrupted, tmp_path):
  process = start(tmp_path)
  wait_for_updates(process, tmp_path, 2)
  workers = workers_of(process)
  os.kill(workers[1], signal.SIGSTOP)
  out, _ = process.communicate(timeout=120)
  assert process.returncode not in (0, 3), out
  _wait_for_the_end(workers.values())
  result = train(tmp_path)
  assert result.returncode == 0, result.stderr
  assert verb('compare', uninterrupted, tmp_path).stdout.count('identical: 11 updates') == 1


def test_without_a_cluster_the_address_must_be_given(tmp_path):
  out = train(tmp_path, '--distributed', '--num_processes=2')
  assert out.returncode == 2 and '--distributed: ' in out.stderr


@pytest.mark.parametrize('process_id, message', [
    (1, '--coordinator_address: ADDRESS did not answer within 2 s (Connection refused); is process '
        '0 running there, and is the port open?'),
    (0, '--distributed: not all 2 processes joined at ADDRESS within 2 s '
        '(--coordinator_timeout_s)')])
def test_a_process_without_the_others_ends_with_one_line(process_id, message, tmp_path):
  """JAX would abort the process, with a C++ stack trace."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  out = train(tmp_path, f'--coordinator_address={address}', '--num_processes=2',
              f'--process_id={process_id}', '--coordinator_timeout_s=2')
  assert out.returncode == 2
  assert out.stderr == f'podracer_jit: {message.replace("ADDRESS", address)}\n'


def test_two_launches_never_get_the_same_port(monkeypatch):
  """The port is bound even before process 0 listens."""
  refused = []

  class Ended:
    returncode, stdout = 0, ()

    def __init__(self, command, **_):
      (address,) = (word for word in command if word.startswith('--coordinator_address='))
      with socket.socket() as second, pytest.raises(OSError, match='in use'):
        second.bind(('127.0.0.1', int(address.rpartition(':')[2])))
      refused.append(address)

    def poll(self):
      return 0

  monkeypatch.setattr(subprocess, 'Popen', Ended)
  monkeypatch.setattr(signal, 'signal', lambda *_: None)
  assert launch.main(['launch', '-n', '2', '--', '--config=x']) == 0
  assert len(refused) == 2 and len(set(refused)) == 1


@pytest.mark.parametrize('change, message', [
    (['--config.num_grad_shards=1'],
     'num_grad_shards: 1 gradient group cannot be split evenly by 2 learner devices'),
    pytest.param(['--config.scheme=fused', '--config.num_shards=2'],
                 'scheme: fused is for one process, not 2', marks=pytest.mark.full),
    pytest.param(['--config.num_shards=1'],
                 'num_shards: 1 shard cannot be split evenly by 2 actors (actor_devices = (0,), '
                 'actors_per_device = 1, in each of 2 processes); take a multiple of 2',
                 marks=pytest.mark.full)])
def test_a_config_that_two_processes_cannot_share_is_refused(change, message, tmp_path):
  process = start(tmp_path, *change)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 2 and message in out, out


@pytest.mark.parametrize('change, message', [
    (['--config.seed=2'],
     ['config: seed: 1 in A, 2 in B', "differ at update 1: the actors' batch differs"]),
    (['--config.optimizer.learning_rate=0.5'],
     ['config: optimizer.learning_rate', 'differ at update 1: the batch is the same and the']),
    (['--config.placement.xla_threads=3'], ['the same'])])
def test_compare_names_the_first_difference(uninterrupted, tmp_path, change, message):
  train(tmp_path, '--config.total_steps=1000', *change)
  result = verb('compare', uninterrupted, tmp_path)
  for words in message:
    assert words in result.stdout
  assert result.returncode == ('differ at' in result.stdout)


@pytest.mark.full
@pytest.mark.parametrize('change, stage', [
    ('--config.optimizer.learning_rate=0.5', 'gradient step 1: parameters'),
    ('--config.loss.baseline_coef=0.25', 'gradient step 1: gradient'),
    ('--config.seed=2', 'state before the update')])
def test_a_deep_comparison_names_the_first_array(change, stage, uninterrupted, tmp_path):
  train(tmp_path, '--config.total_steps=1000', change)
  result = verb('compare', '--deep', uninterrupted, tmp_path)
  assert result.returncode == 1, result.stderr
  assert f'\nthe first to differ: {stage}\n' in result.stdout
  assert re.search(r'\n  params/\S+: [\d,]+ of [\d,]+ numbers differ, by at most [\d,]+ units in '
                   'the last place\n', result.stdout)


def test_a_comparison_with_a_closed_output_reports_its_result(uninterrupted):
  line = f'{sys.executable} -P -m podracer_jit compare {uninterrupted} {uninterrupted} | true'
  done = subprocess.run(['bash', '-o', 'pipefail', '-c', line], capture_output=True, text=True,
                        env=QUICK, timeout=300, check=False)
  assert done.returncode == 141
  assert done.stderr == ('podracer_jit compare: the output was cut; identical: 11 updates, batches '
                         'and parameters\n')


def _side(folder, updates, garbled=()):
  """Writes the workdir of a run with receipts of the given updates, some of them garbled."""
  folder.mkdir()
  config = resolve(small()).fields
  record.new(config).write(folder)
  header = dict(segment=0, first_update=1, versions={}, canary='')
  receipts = [dict(update=update, batch='0' * 16, params='1' * 16) for update in updates]
  (folder / 'receipts.jsonl').write_text(''.join(
      '{"upd\n' if line.get('update') in garbled else json.dumps(line) + '\n'
      for line in [header, *receipts]))
  (folder / 'metrics.jsonl').write_text('')
  return str(folder)


@pytest.mark.parametrize('a, b, code, message', [
    ((range(1, 5),), (range(1, 5),), 0, ['identical: 4 updates, batches and parameters\n']),
    ((range(1, 9),), (range(1, 5),), 0, [
        'identical as far as both go: 4 updates, batches and parameters; A goes on to update 8\n']),
    ((range(2, 9, 2),), (range(1, 9),), 2, [
        'A: ', 'no line of 1, 3, 5, 7\n', 'unknown, since receipts are missing']),
    ((range(1, 9),), (range(1, 9), (2, 3)), 2, [
        'B: ', '2 garbled lines\n', 'no line of 2 to 3\n',
        'unknown, since receipts are missing']),
])
def test_runs_are_not_called_identical_on_a_part_of_their_updates(a, b, code, message, tmp_path,
                                                                  capsys):
  sides = [_side(tmp_path / name, *side) for name, side in (('a', a), ('b', b))]
  assert compare.main(['podracer_jit compare', *sides]) == code
  out = capsys.readouterr().out
  assert all(word in out for word in message), out
  assert ('\nidentical' in f'\n{out}') == (code == 0)


def test_compare_needs_two_runs(uninterrupted, tmp_path):
  assert verb('compare', uninterrupted).returncode == 2
  result = verb('compare', uninterrupted, tmp_path)
  assert result.returncode == 2 and 'holds no run' in result.stderr


def test_rerun_repeats_an_update(uninterrupted, tmp_path):
  """The command begins with checkpoint 4, within a segment that ends with update 5."""
  workdir = tmp_path / 'copy'
  shutil.copytree(uninterrupted, workdir)
  result = verb('rerun', f'--workdir={workdir}', '--update=7')
  assert result.returncode == 0, result.stderr
  rollout = np.load(workdir / 'update_7.npz')
  steps, envs = rollout['action'].shape
  assert rollout['obs'].shape[:2] == (steps + 1, envs) and rollout['valid'].sum() > 0
  assert (rollout['reward'][~rollout['valid']] == 0).all()
  assert rollout['extras/value'].shape == rollout['ended'].shape == (steps, envs)
  receipts = workdir / 'receipts.jsonl'
  wrong_text = receipts.read_text().replace(
      next(line['params'] for line in lines(receipts) if line.get('update') == 7), '0' * 16)
  assert wrong_text != receipts.read_text()
  receipts.write_text(wrong_text)
  result = verb('rerun', f'--workdir={workdir}', '--update=7')
  assert result.returncode == 1 and 'differs from its receipt' in result.stderr
  (workdir / 'checkpoints' / '4' / checkpoints.MANIFEST).write_text('{')
  result = verb('rerun', f'--workdir={workdir}', '--update=7')
  assert result.returncode == 2 and 'the checkpoint of update 4 is broken' in result.stderr
  shutil.rmtree(workdir / 'checkpoints' / '4')  # the seed gives the first state
  result = verb('rerun', f'--workdir={workdir}', '--update=6')
  assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(uninterrupted, tmp_path):
  workdir = tmp_path / 'copy'
  shutil.copytree(uninterrupted, workdir)
  newest = max(int(path.name) for path in (workdir / 'checkpoints').iterdir())
  shutil.rmtree(workdir / 'checkpoints' / str(newest))
  train_command = command(*CATCH, f'--workdir={workdir}')
  # No file may exceed 12 KB; one array has 16 KB, however Orbax distributes arrays over files.
  full = subprocess.run(['bash', '-c', 'ulimit -f 12; exec "$@"', 'bash', *train_command],
                        capture_output=True, text=True, timeout=300, env=QUICK, check=False)
  assert full.returncode == 1
  # Open files of Orbax may print more errors when Python ends.
  (error,) = [line for line in full.stderr.splitlines() if line.startswith('podracer_jit: ')]
  assert 'File too large' in error and str(workdir) in error
  assert error.count(f'the last good checkpoint is that of update {newest - 3}, in ') == 1
  assert str(newest) not in os.listdir(workdir / 'checkpoints')
  assert not [path for path in workdir.rglob('*') if 'tmp' in path.name]
  assert train(workdir).returncode == 0
  result = verb('compare', uninterrupted, workdir)
  assert 'identical: 11 updates, batches and parameters\n' in result.stdout


@pytest.mark.parametrize('args, message', [
    (['--update=700'], 'no receipt of update 700'),
    (['--update=7', '--env=3'], "Unknown command line flag 'env'"),
    ([], '--update are needed')])
def test_rerun_needs_an_update_of_the_run(args, message, uninterrupted, capsys):
  assert rerun.main(['podracer_jit rerun', f'--workdir={uninterrupted}', *args]) == 2
  assert message in capsys.readouterr().err


@pytest.mark.parametrize('scheme', ['cleanba', 'fused'])
def test_numbers_that_are_not_finite_end_the_run(scheme, tmp_path):
  result = train(tmp_path, '--config.optimizer.learning_rate=1e30',
                 '--config.optimizer.anneal=False', f'--config.scheme={scheme}')
  assert result.returncode == 1
  error = result.stderr.strip().splitlines()[-1]
  assert re.search(r'Diverged: update \d+ \([\d,]+ steps\): .*loss.* not finite \(.*nan', error)
  assert 'the last good checkpoint is none: the run had just begun' in error
  assert not list(tmp_path.glob('checkpoints/*'))


def test_a_run_that_diverges_later_names_its_last_good_checkpoint(tmp_path):
  result = train(tmp_path, '--config.optimizer.learning_rate=1e15', '--config.num_minibatches=1',
                 '--config.checkpoint.every_updates=1')
  assert result.returncode == 1
  error = result.stderr.strip().splitlines()[-1]
  saved = max(int(path.name) for path in (tmp_path / 'checkpoints').iterdir())
  assert f'Diverged: update {saved + 1} ' in error
  assert f'the last good checkpoint is that of update {saved}, in ' in error
