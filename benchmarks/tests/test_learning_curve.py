"""The learning curve in README is drawn from the committed points."""

import json
from pathlib import Path

import pytest

from benchmarks import learning_curve

IMAGES = Path(__file__).parents[2] / 'docs' / 'images'


@pytest.mark.quick
def test_a_curve_has_the_points_of_the_metrics_and_a_table(tmp_path):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  returns = [None, *range(1000)]
  (workdir / 'metrics.jsonl').write_text(''.join(
      json.dumps(dict(steps=100 * i, elapsed_s=i / 2, episode_return=value)) + '\n'
      for i, value in enumerate(returns, 1)))
  out = tmp_path / 'curve'

  assert learning_curve.main(['', f'--out={out}', '--high=1000', str(workdir)]) == 0
  points = learning_curve.read_csv(out.with_suffix('.csv'))['run']
  assert points[-1] == learning_curve.Point(100_100, 500.5, 999)
  assert len(points) <= learning_curve.POINTS

  picture = out.with_suffix('.svg').read_text()
  assert picture.count('<polyline') == 1
  assert learning_curve.main(['', f'--out={out}', '--high=1000']) == 0
  assert out.with_suffix('.svg').read_text() == picture


def test_the_committed_picture_is_drawn_from_the_committed_points(tmp_path):
  out = tmp_path / 'curve'
  out.with_suffix('.csv').write_text((IMAGES / 'pong_laptop.csv').read_text())
  assert learning_curve.main(['', f'--out={out}']) == 0
  assert out.with_suffix('.svg').read_text() == (IMAGES / 'pong_laptop.svg').read_text()


def test_ticks_are_round_numbers():
  assert learning_curve.ticks(-21, 21) == [-20, -10, 0, 10, 20]
  assert learning_curve.ticks(0, 1_001_000) == [0, 200_000, 400_000, 600_000, 800_000, 1_000_000]
