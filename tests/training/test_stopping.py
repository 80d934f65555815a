"""The effect of signals before training, in training and during a save."""

import signal
import subprocess
import sys
import threading

import pytest

from podracer_jit import errors
from podracer_jit.training import stopping
from tests import processes


@pytest.fixture(autouse=True)
def not_ignored():
  """Restores default handlers, since background jobs and nohup ignore signals."""
  before = {number: signal.signal(number, signal.SIG_DFL) for number in stopping.SIGNALS}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', stopping.SIGNALS)
def test_before_training_a_signal_ends_the_process(number):
  before = signal.getsignal(number)
  calls = []
  with stopping.handled(leave=lambda: calls.append(1)):
    signal.raise_signal(number)
  assert signal.getsignal(number) == before
  assert calls == [1]


@pytest.mark.parametrize('number', stopping.SIGNALS)
def test_in_training_the_first_signal_asks_for_a_stop_and_the_second_interrupts(number):
  time_s = 0.0
  with stopping.handled(clock=lambda: time_s) as stop:
    stop.begin_training()
    assert not stop.asked()
    signal.raise_signal(number)
    assert stop.asked()
    time_s = 0.4
    signal.raise_signal(number)  # the same request, from another sender
    time_s = 1.0
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(number)


INTERRUPTED = """
import signal, sys
from podracer_jit.training import stopping

def handle(interrupted_line):
  lines = 0

  def trace(frame, event, arg):
    nonlocal lines
    if event == 'line':
      lines += 1
      if lines == interrupted_line:
        signal.raise_signal(signal.SIGTERM)
    return trace

  with stopping.handled() as stop:
    stop.begin_training()
    sys.settrace(trace)
    stop.handle(signal.SIGTERM, None)
    sys.settrace(None)
    assert stop.asked()
  return lines

count = handle(0)
for line in range(1, count + 1):
  handle(line)
print('lines:', count)
"""


def test_signals_that_interrupt_each_other_are_one_request():
  """The end of a launcher sends several at once; a lock in the handler has made a process hang.

  Here a signal comes before the first, second, ... line that the handler of another one runs, in
  whatever module.
  """
  process = subprocess.run([sys.executable, '-c', INTERRUPTED], capture_output=True, text=True,
                           timeout=60, check=False)
  assert process.returncode == 0, process.stderr
  name, count = process.stdout.split()
  assert name == 'lines:' and int(count) >= 5


BUSY = """
import sys, threading, time
import jax
from podracer_jit.training import stopping

with stopping.handled() as stop:
  if sys.argv[1] != 'starting':
    stop.begin_training()
  if sys.argv[1] == 'tracing':
    print('tracing', flush=True)
    while not stop.asked():
      time.sleep(0.01)
  # As in a compiler, the main thread calls no Python meanwhile.
  endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0, x)).lower(
      0).compile()
  threading.Timer(1, print, ['busy'], dict(flush=True)).start()  # when the main thread is there
  jax.block_until_ready(endless(0))
"""


@pytest.mark.parametrize('when, lines', [
    ('starting', ['podracer_jit: interrupted while starting; nothing is lost']),
    ('training', ['podracer_jit: stops when XLA has compiled; a second signal ends it at once',
                  'podracer_jit: interrupted while XLA compiles; what was saved stays'])])
def test_signals_end_a_process_whose_main_thread_is_in_a_library(when, lines):
  with processes.Popen([sys.executable, '-c', BUSY, when], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True) as process:
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stdout.readline() == 'busy\n'
    for line in lines:
      process.send_signal(signal.SIGTERM)
      process.send_signal(signal.SIGTERM)  # the same request, from another sender
      assert process.stderr.readline() == f'{line}\n'
    assert process.wait() == errors.INTERRUPTED
    limit.cancel()


def test_a_second_signal_ends_a_process_that_has_begun_to_compile_since_the_first():
  """The first signal comes while the main thread traces, so Python handles it there."""
  with processes.Popen([sys.executable, '-c', BUSY, 'tracing'], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True) as process:
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stdout.readline() == 'tracing\n'
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == (
        'podracer_jit: stops after this update; a second signal ends it at once\n')
    assert process.stdout.readline() == 'busy\n'
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == (
        'podracer_jit: interrupted while XLA compiles; what was saved stays\n')
    assert process.wait() == errors.INTERRUPTED
    limit.cancel()


SLOW = """
import sys, time
from podracer_jit.training import stopping

with stopping.handled() as stop:
  stop.begin_training()
  print('training', flush=True)
  while not stop.asked():
    time.sleep(0.01)
  time.sleep(float(sys.argv[1]))  # the learner may still compile
  stop.end()
"""


@pytest.mark.parametrize('seconds, told', [
    ('4', 'podracer_jit: stops after this update; a second signal ends it at once\n'), ('0', '')])
def test_a_stop_that_takes_long_is_told(seconds, told):
  with processes.Popen([sys.executable, '-c', SLOW, seconds], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == 'training\n'
    process.send_signal(signal.SIGTERM)
    _, lines = process.communicate(timeout=60)
    assert process.returncode == 0 and lines == told


FORKED = """
import os, signal, time
from podracer_jit.training import stopping

read, write = os.pipe()
signal.signal(signal.SIGUSR1, lambda *args: None)
with stopping.handled():
  signal.raise_signal(signal.SIGUSR1)
  child = os.fork()
  if not child:
    os.write(write, b'1')
    while True:
      time.sleep(0.1)
  os.read(read, 1)
  os.kill(child, signal.SIGTERM)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
  time.sleep(stopping.PATIENCE_S + 1)
print('goes on')
"""


def test_signals_of_a_forked_process_and_other_signals_end_nothing():
  process = subprocess.run([sys.executable, '-c', FORKED], capture_output=True, text=True,
                           timeout=60, check=False)
  assert process.stdout == 'goes on\n', process.stderr


def test_no_signal_interrupts_a_save():
  time_s = 0.0
  with stopping.handled(clock=lambda: time_s) as stop:
    stop.begin_training()
    signal.raise_signal(signal.SIGINT)
    with stop.saving():
      time_s = 1.0
      signal.raise_signal(signal.SIGTERM)
      time_s = 2.0
      signal.raise_signal(signal.SIGTERM)
    assert stop.asked()
    time_s = 3.0
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGTERM)


def test_after_the_end_signals_do_nothing():
  time_s = 0.0
  with stopping.handled(clock=lambda: time_s) as stop:
    stop.begin_training()
    stop.end()
    for time_s in (1.0, 2.0, 3.0):  # noqa: B007 - the clock reads it
      signal.raise_signal(signal.SIGTERM)


def test_an_ignored_hangup_stays_ignored():
  """nohup ignores the signal."""
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with stopping.handled() as stop:
      signal.raise_signal(signal.SIGHUP)
      assert not stop.asked()
  finally:
    signal.signal(signal.SIGHUP, before)
