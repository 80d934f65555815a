"""The model of a learner on a cluster: its limits, and its check on a real cluster."""

import re
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import cluster_model
from benchmarks.cluster_model import Load, Machine, limits, predict

MACHINE = Machine(call_s=0.001, arrival_s=1e-9, round_trip_s=0.002, hand_over_s=2e-9)


@pytest.mark.full
def test_each_limit_by_hand():
  load = Load(4, 0.096, 1e6, params=5e6, fresh=0.5, two_calls=False)
  most = limits(MACHINE, load, bandwidth=1e8)
  np.testing.assert_allclose(most['actors'], 4 / (0.096 + 0.002 + 0.002))
  np.testing.assert_allclose(most["learner's calls"], 1 / 0.002)
  np.testing.assert_allclose(most['network, in'], 100)
  np.testing.assert_allclose(most['network, out'], 40)
  two = limits(MACHINE, load._replace(two_calls=True), 1e8)
  np.testing.assert_allclose(two['actors'], 4 / 0.098)


@pytest.mark.full
def test_a_machine_gives_no_more_than_its_cores():
  load = Load(100, 0.0, 1e6, 0, 0)
  assert predict(MACHINE, load, 2) <= 2 / (1e6 * 3e-9)
  assert predict(MACHINE, load, 2) == pytest.approx(2 * predict(MACHINE, load, 1))
  # Beyond that, the learner's process limits.
  assert predict(MACHINE, load, 64) == pytest.approx(500)


@pytest.mark.full
def test_the_papers_break_where_the_page_says():
  text = (cluster_model.Path(__file__).parents[2] / 'docs' / 'machines.md').read_text()
  for load in (cluster_model.apex(), cluster_model.nappo()):
    for gigabits in (1, 10, 100):
      most = limits(cluster_model.PUBLISHED, load, gigabits * 1e9 / 8)
      served = load.actors * min(1.0, min(most.values()) / most['actors'])
      assert re.search(rf'\| {gigabits} Gbit/s \| {served:.0f} of {load.actors} \|', text), (
          gigabits, served)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != 'linux', reason='Ray on Linux')
def test_it_measures_and_compares():
  pytest.importorskip('ray')
  done = subprocess.run([sys.executable, '-m', 'benchmarks.cluster_model', '--seconds=0.3',
                         '--tolerance=1000'], capture_output=True, text=True, timeout=300,
                        check=False)
  assert done.returncode == 0, done.stderr
  assert len(re.findall(r'/s +\d+\.\d\d$', done.stdout, re.MULTILINE)) == len(cluster_model.CHECKS)
  assert 'Ape-X: 360 actors' in done.stdout
