"""Signals, closed terminals and lost pipes end real processes with a complete workdir."""

import fcntl
import os
import signal
import socket
import subprocess
import termios
import time
from pathlib import Path

import pytest

from podracer_jit.errors import INTERRUPTED, REFUSED, STOPPED
from podracer_jit.play import evaluation
from podracer_jit.workdir import checkpoints, journal
from tests import processes
from tests.processes import command, default_signals
from tests.runs import QUICK

ENDLESS = ['--config=configs/impala_catch.py:smoke', '--config.total_steps=100000000',
           '--config.optimizer.anneal=False', '--config.log.tensorboard=False']


@pytest.fixture
def start():
  """Returns a function that starts a training; the end of the test kills it."""
  running = []

  def start(workdir, *args, popen=processes.Popen, program=None, **kwargs):
    kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | kwargs
    line = command(*ENDLESS, f'--workdir={workdir}', *args)
    if program:
      line[2:4] = ['-c', program]  # instead of -m podracer_jit
    running.append(popen(line, **kwargs))
    return running[-1]

  yield start
  for process in running:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
      if pipe:
        pipe.close()


def count(workdir):
  path = workdir / 'metrics.jsonl'
  return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(process, condition):
  while not condition():
    assert process.poll() is None, process.communicate()
    time.sleep(0.005)


def check_saved(workdir):
  """Checks that the newest checkpoint is of the last update, and that no leftovers exist."""
  receipts = journal.read_receipts(workdir)
  assert receipts.problems == []
  assert checkpoints.newest_whole(workdir) == max(receipts.by_update) == count(workdir)
  assert not list(workdir.rglob('*tmp*')) and not (workdir / 'lock').exists()


def test_two_runs_in_one_workdir_and_a_hangup(start, tmp_path):
  first = start(tmp_path, stdin=subprocess.DEVNULL)
  wait_for(first, lambda: count(tmp_path) > 3)
  second = processes.run(command(*ENDLESS, f'--workdir={tmp_path}'), timeout=120)
  assert second.returncode == REFUSED
  (line,) = second.stderr.splitlines()
  assert line.startswith(f'podracer_jit: --workdir: {tmp_path} is in use by process {first.pid} on '
                         f'{socket.gethostname()}, since ')
  before = count(tmp_path)
  wait_for(first, lambda: count(tmp_path) > before)
  first.send_signal(signal.SIGHUP)
  out, errors = first.communicate(timeout=120)
  assert first.returncode == STOPPED, errors
  assert 'the same command goes on' in out
  check_saved(tmp_path)


def test_a_closed_terminal_saves(start, tmp_path):
  """The kernel sends SIGHUP, and printing fails from then on."""
  terminal, end = os.openpty()

  def in_terminal():
    default_signals()
    os.setsid()
    fcntl.ioctl(end, termios.TIOCSCTTY, 0)

  process = start(tmp_path, stdin=end, stdout=end, stderr=end, env=QUICK,
                  preexec_fn=in_terminal, popen=subprocess.Popen)
  os.close(end)
  os.set_blocking(terminal, False)

  def writes():
    try:
      os.read(terminal, 1 << 16)  # a full terminal would block the program
    except BlockingIOError:
      pass
    return count(tmp_path) > 3

  wait_for(process, writes)
  os.close(terminal)
  assert process.wait(timeout=120) == STOPPED
  check_saved(tmp_path)


def test_a_run_outlives_the_reader_of_its_output(start, tmp_path):
  process = start(tmp_path, '--config.log.every_seconds=0.05', stderr=subprocess.STDOUT)
  assert 'starting' in process.stdout.readline()
  process.stdout.close()
  wait_for(process, lambda: count(tmp_path) > 3)
  before = count(tmp_path)
  wait_for(process, lambda: count(tmp_path) > before + 3)
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=120) == STOPPED
  check_saved(tmp_path)


@pytest.mark.full
def test_a_run_that_saves_after_each_update_can_be_evaluated(start, tmp_path):
  """The run replaces its checkpoints while the evaluation reads them."""
  process = start(tmp_path, '--config.checkpoint.every_updates=1', '--config.checkpoint.keep=1')
  wait_for(process, lambda: checkpoints.saved_updates(tmp_path))
  experiment = evaluation.read_experiment(tmp_path)
  updates = [evaluation.restore(tmp_path, experiment).update for _ in range(12)]
  assert process.poll() is None
  assert updates == sorted(updates) and updates[-1] > updates[0] > 0


# A save that lasts until three signals have come, however fast the machine writes.
SIGNALLED_SAVE = """
import os, signal, threading, time
from podracer_jit.cli.main import run
from podracer_jit.training import stopping
from podracer_jit.workdir.checkpoints import Checkpoints

save = Checkpoints.save

def send():
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(1.2 * stopping.REPEAT_S)

def save_under_signals(*args, **kwargs):
  sender = threading.Thread(target=send)
  sender.start()
  save(*args, **kwargs)
  sender.join()

Checkpoints.save = save_under_signals
run()
"""


def test_signals_during_a_save_do_no_harm(start, tmp_path):
  process = start(tmp_path, '--config.checkpoint.every_updates=1', program=SIGNALLED_SAVE)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == STOPPED, errors
  assert 'Traceback' not in errors
  assert checkpoints.saved_updates(tmp_path)
  check_saved(tmp_path)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_gives_one_line(number, start, tmp_path):
  process = start(tmp_path / 'run', popen=subprocess.Popen, env=QUICK,
                  preexec_fn=default_signals)
  # The process is importing modules, which is the beginning of its start.
  maps = Path(f'/proc/{process.pid}/maps')
  wait_for(process, lambda: 'jaxlib' in maps.read_text())
  process.send_signal(number)
  out, errors = process.communicate(timeout=120)
  assert process.returncode == INTERRUPTED
  assert out == ''
  assert errors == 'podracer_jit: interrupted while starting; nothing is lost\n'
  assert not (tmp_path / 'run').exists()
