"""A run that begins a cluster on this machine: it ends with the run, however that ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from podracer_jit.errors import STOPPED
from podracer_jit.workdir import journal
from tests.ray_nodes import is_ours
from tests.runs import QUICK

pytest.importorskip('ray')


def of_session(number):
  """Returns the living processes of a session."""
  alive = []
  for process in psutil.process_iter():
    try:
      if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
        alive.append(process)
    except (ProcessLookupError, psutil.Error):
      pass
  return alive


@pytest.mark.full
@pytest.mark.parametrize('end', ['ctrl_c', 'kill'])
def test_nothing_outlives_the_run(end, tmp_path):
  environment = {name: value for name, value in QUICK.items() if not name.startswith('RAY_')}
  with (tmp_path / 'log').open('w') as log:
    process = subprocess.Popen(
        [sys.executable, '-m', 'podracer_jit', '--config=impala_catch', '--config.scheme=impala',
         '--config.placement.cluster=ray', '--config.total_steps=100000000',
         '--config.optimizer.anneal=False', '--config.log.tensorboard=False',
         f'--workdir={tmp_path / "run"}'],
        env=environment | {'HOME': str(tmp_path)}, start_new_session=True, stdout=log,
        stderr=subprocess.STDOUT)
  try:
    metrics = tmp_path / 'run' / journal.METRICS
    deadline = time.monotonic() + 500
    while not metrics.exists() or len(journal.read_lines(metrics)) < 5:
      assert process.poll() is None and time.monotonic() < deadline, (tmp_path / 'log').read_text()
      time.sleep(0.1)
    running = of_session(process.pid)
    # One actor, and the daemons of Ray.
    (actor,) = filter(is_ours, running)
    assert len(running) > 3
    # The actor may use a busy processor as much as the learner.
    assert actor.nice() == psutil.Process(process.pid).nice()
    since = time.monotonic()
    if end == 'ctrl_c':
      os.killpg(process.pid, signal.SIGINT)  # as a terminal does
      assert process.wait(timeout=60) == STOPPED, (tmp_path / 'log').read_text()
      assert time.monotonic() - since < 10
    else:
      process.kill()
      process.wait()
    assert not psutil.wait_procs([actor], timeout=10)[1]
    # Two agents of Ray need longer to notice that their parent was killed.
    assert not psutil.wait_procs(running, timeout=10 if end == 'ctrl_c' else 120)[1]
  finally:
    for left in of_session(process.pid):
      left.kill()


SPILL = '''
import numpy as np
from podracer_jit import cluster
cluster.set_ray_environment()
from podracer_jit.cluster import ray_cluster
lines = []
ray_cluster._logger.warning = lambda text, *args: lines.append(text % args)
with ray_cluster.connected(1, 0, 3, 1, 80 * 2**20, lambda folder: None) as cluster:
  kept = [cluster.publish(np.ones(10_000_000, np.uint8)) for _ in range(4)]
  cluster.metrics()
  assert not lines
  kept += [cluster.publish(np.ones(10_000_000, np.uint8)) for _ in range(12)]
  cluster._looked_s = -1e9
  cluster.metrics()
  (line,) = lines
  assert 'set a larger --config.placement.store_gb' in line, line
'''


@pytest.mark.full
def test_spilling_gives_a_warning_that_names_the_option():
  subprocess.run([sys.executable, '-c', SPILL], check=True, timeout=200)
