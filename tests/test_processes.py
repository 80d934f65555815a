"""Children of the fork server behave like processes of `subprocess`."""

import os
import signal
import subprocess
import sys

import pytest

from tests import processes


def python(*args):
  return [sys.executable, '-P', *args]


def test_a_child_has_its_own_arguments_folder_output_and_exit_code(tmp_path):
  program = ('import os, sys\nprint(os.getpid(), os.getcwd(), sys.argv[1:])\n'
             'print("message", file=sys.stderr)\nsys.exit(7)')
  process = processes.Popen(python('-c', program, 'a', 'b'), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=tmp_path)
  out, errors = process.communicate(timeout=60)
  assert process.returncode == 7
  assert out == f"{process.pid} {tmp_path} ['a', 'b']\n" and errors == 'message\n'


def test_an_exception_is_a_traceback_and_exit_code_1():
  done = processes.run(python('-c', 'raise ValueError("no")'))
  assert done.returncode == 1 and done.stderr.endswith('ValueError: no\n')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_the_exit_code_of_a_killed_child_is_the_signal(number):
  process = processes.Popen(python('-c', 'import time; print(1, flush=True); time.sleep(1000)'),
                            stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == '1\n' and process.poll() is None
  process.send_signal(number)
  assert process.wait(timeout=60) == -number
  process.stdout.close()


def test_children_do_not_share_changes():
  first = processes.run(python('-c', 'import podracer_jit, os; podracer_jit.x = 1; os.environ["X"]'
                               ' = "1"'))
  second = processes.run(python('-c', 'import podracer_jit, os\n'
                                'print(hasattr(podracer_jit, "x"), os.environ.get("X"))'))
  assert first.returncode == 0 and second.stdout == 'False None\n'


def test_a_child_that_is_too_slow_is_killed():
  with pytest.raises(subprocess.TimeoutExpired):
    processes.run(python('-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(1000)'),
                  timeout=0.5)


def test_other_environment_variables_are_refused():
  with pytest.raises(AssertionError):
    processes.run(python('-c', ''), env=dict(os.environ, X='1'))
