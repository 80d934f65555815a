"""Lines that a command prints before it trains, and what it need not wait for."""

import contextlib
import dataclasses
import sys
import threading
import types

import numpy as np
import pytest

from podracer_jit.cli.compare import header_differences
from podracer_jit.experiment import build
from podracer_jit.runtime import tried
from podracer_jit.training import restoring, trainer
from podracer_jit.workdir import journal
from tests import processes
from tests.runs import changed, fresh, small, train

CATCH = ['--config=configs/impala_catch.py:smoke', '--config.log.tensorboard=False',
         '--config.total_steps=1000']
WITH_OTHER_VERSIONS = """
import sys
from podracer_jit.cli import main
from podracer_jit.cli.compare import header_differences
from podracer_jit.runtime import tried
tried.TRIED |= {'jax': ('0.1.0', '0.2.0'), 'ray': ('0.1', '0.1')}
sys.argv[0] = 'podracer_jit'
main.run()
"""


def test_an_untried_version_is_one_line_and_no_error(tmp_path):
  """Ray is not loaded, so its version does not matter."""
  done = processes.run([sys.executable, '-c', WITH_OTHER_VERSIONS, *CATCH,
                        f'--workdir={tmp_path}/run'])
  assert done.returncode == 0 and 'finished at update' in done.stdout, done.stderr
  (line,) = [line for line in done.stderr.splitlines() if 'untried v' in line]
  assert line.startswith('podracer_jit: untried versions: jax ')
  assert line.endswith(' (tried: 0.1.0 to 0.2.0)') and 'untried v' not in done.stdout


@pytest.mark.parametrize('flags', ['', '--xla_cpu_enable_fast_math=false'])
def test_receipts_have_the_flags_of_xla(flags, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', flags)
  train(fresh(small(total_steps=200)), tmp_path)
  header = journal.read_lines(tmp_path / journal.RECEIPTS)[0]
  assert header.get('xla_flags', '') == flags
  # A comparison names them as a cause.
  lines = header_differences([header], [dict(header, xla_flags='--xla_other=1')])
  assert lines == [f"segment 0: XLA_FLAGS were {flags!r} in A and '--xla_other=1' in B"]


def test_programs_do_not_wait_for_the_canary(tmp_path, monkeypatch):
  real_segment, real_canary = build.segment, restoring.canary
  is_built = threading.Event()

  @contextlib.contextmanager
  def segment(*args):
    with real_segment(*args) as graph:
      is_built.set()
      yield graph

  def canary():
    assert is_built.wait(60)
    return real_canary()

  monkeypatch.setattr(build, 'segment', segment)
  monkeypatch.setattr(restoring, 'canary', canary)
  assert train(fresh(small(total_steps=200)), tmp_path)
  header = journal.read_lines(tmp_path / journal.RECEIPTS)[0]
  assert header['canary'] == real_canary()


def test_versions_that_were_tried_are_no_line(monkeypatch):
  run = fresh(small())
  monkeypatch.setattr(tried, 'TRIED', {'envpool': ('0.1', '99'), 'ray': ('0.1', '0.2')})
  assert not list(trainer._untried(run))
  monkeypatch.setattr(tried, 'TRIED', {'envpool': ('0.1', '0.2')})
  assert len(list(trainer._untried(run))) == 1
  other = dataclasses.replace(run, place=run.place._replace(process=1, processes=2))
  assert not list(trainer._untried(other))


def placed(run, actor, learner, **fields):
  """Returns the run as if its actors and its learner had other kinds of devices."""
  devices = [types.SimpleNamespace(platform=platform) for platform in (actor, learner)]
  mesh = types.SimpleNamespace(devices=np.array(devices[1:]))
  place = run.place._replace(actors=tuple(devices[:1]), mesh=mesh, env_threads=3, **fields)
  return dataclasses.replace(run, place=place)


@pytest.fixture(scope='module')
def run():
  return fresh(changed(small(), num_shards=2))


@pytest.mark.parametrize('actor, learner', [('gpu', 'gpu'), ('cpu', 'gpu'), ('cpu', 'tpu')])
def test_beside_an_accelerator_a_line_says_that_simulators_are_on_the_cpu(run, actor, learner):
  (line,) = trainer._where(placed(run, actor, learner))
  assert line == ("simulators of CartPole-v1 run on this host's CPU (3 threads in each of 2 pools)"
                  f', the policy on {actor}, the learner on {learner}')
  (line,) = trainer._where(placed(run, actor, learner, processes=2))
  assert line == ("simulators of CartPole-v1 run on each host's CPU, in each process (3 threads), "
                  f'the policy on {actor}, the learner on {learner}')


def test_without_accelerators_or_simulators_there_is_no_such_line(run):
  assert not list(trainer._where(run)) and not list(trainer._where(placed(run, 'cpu', 'cpu')))
  functions = fresh(small(task='tests.workdirs.tiny_envs:Corridor'))
  assert functions.experiment.spec.is_function
  assert not list(trainer._where(placed(functions, 'gpu', 'gpu')))
