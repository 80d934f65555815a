"""Sets of tasks, and published scores.

`TASKS` names the sets, for sweeps and reports. `published` returns the scores of a task, each with
its protocol and source: they are of other programs, which often play by other rules, so equal
numbers are not what one should expect. The tables are CSV files in data/.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_DATA = Path(__file__).parent / 'data'


class Published(NamedTuple):
  """A published score of a task."""

  score: float  # mean return of an episode
  deviation: float | None  # standard deviation over seeds; None: not published
  title: str  # of the program and the algorithm
  algorithm: str  # its name in our configs if we have it, else its own
  steps: int | None  # agent steps of the training; None: the protocol says how much
  protocol: str  # how it was measured
  reference: str  # paper or page that has it

  def words(self) -> str:
    """Returns the score as a line of text."""
    deviation = '' if self.deviation is None else f' +- {self.deviation:,.10g}'
    return f'{self.score:,.10g}{deviation}  {self.title} ({self.protocol}; {self.reference})'


class Bounds(NamedTuple):
  """The scores that the human-normalised score takes as 0 and 1."""

  random: float  # of random play
  human: float


def _rows(name: str) -> Iterator[dict[str, str]]:
  """Yields the rows of a table in data/; lines that begin with # are comments."""
  lines = (_DATA / name).read_text().splitlines()
  yield from csv.DictReader(line for line in lines if not line.startswith('#'))


@functools.cache
def human_scores() -> Mapping[str, Bounds]:
  """Returns the scores of random play and of a human, by task: the 57 games of Atari."""
  return {row['game']: Bounds(float(row['random']), float(row['human']))
          for row in _rows('atari_scores.csv')}


@functools.cache
def _published() -> Mapping[str, tuple[Published, ...]]:
  sources = {row['source']: row for row in _rows('published_sources.csv')}
  scores: dict[str, tuple[Published, ...]] = {}
  for row in _rows('published_scores.csv'):
    source = sources[row['source']]
    score = Published(
        float(row['score']), float(row['deviation']) if row['deviation'] else None,
        source['title'], source['algorithm'], int(source['steps']) if source['steps'] else None,
        source['protocol'], source['reference'])
    scores[row['task']] = (*scores.get(row['task'], ()), score)
  return scores


def published(task: str) -> tuple[Published, ...]:
  """Returns the published scores of a task, of any algorithm; empty if there are none.

  Some sources do not say which version of a task they mean; their scores come last.

  Args:
    task: its name in a config, such as `Pong-v5`.
  """
  name, _, version = task.rpartition('-v')
  unversioned = _published().get(name, ()) if version.isdecimal() else ()
  return _published().get(task, ()) + unversioned


def nearest(task: str, algorithm: str, steps: int) -> Published | None:
  """Returns the published score that a result is best compared with, None if there is none.

  It is of the same algorithm if there is one; among several, its number of steps is nearest by
  ratio.

  Args:
    task: its name in a config.
    algorithm: its name in a config.
    steps: agent steps of the training.
  """
  def distance(score: Published) -> tuple[bool, float]:
    ratio = math.log(score.steps / max(steps, 1)) if score.steps else math.inf
    return score.algorithm != algorithm, abs(ratio)
  return min(published(task), key=distance, default=None)


def normalised(task: str, score: float) -> float | None:
  """Returns the human-normalised score of a return; None for a task without human scores."""
  bounds = human_scores().get(task)
  if bounds is None:
    return None
  return (score - bounds.random) / (bounds.human - bounds.random)


TASKS: Mapping[str, tuple[str, ...]] = {
    # Bellemare et al. 2013 (1207.4708), the 57 games of Wang et al. 2016.
    '@atari57': tuple(human_scores()),
    # Aitchison et al. 2023 (2210.02019): five games that predict the median of all 57.
    '@atari5': ('BattleZone-v5', 'DoubleDunk-v5', 'NameThisGame-v5', 'Phoenix-v5', 'Qbert-v5'),
    # The games of NAPPO's table 1 (2007.02622), for `ppo_atari_8`.
    '@nappo6': ('Enduro-v5', 'Freeway-v5', 'Boxing-v5', 'Pong-v5', 'IceHockey-v5',
                'StarGunner-v5'),
    # Nine of Gymnasium's MuJoCo tasks.
    '@mujoco9': (
        'HalfCheetah-v4', 'Hopper-v4', 'Humanoid-v4', 'InvertedDoublePendulum-v4',
        'InvertedPendulum-v4', 'Pusher-v4', 'Reacher-v4', 'Swimmer-v4', 'Walker2d-v4'),
    # D'Oro et al. 2023, "Sample-efficient reinforcement learning by breaking the replay ratio
    # barrier": DMC15-500k.
    '@dmc15': (
        'AcrobotSwingup-v1', 'CheetahRun-v1', 'FingerTurnHard-v1', 'FishSwim-v1', 'HopperHop-v1',
        'HopperStand-v1', 'HumanoidRun-v1', 'HumanoidStand-v1', 'HumanoidWalk-v1',
        'PendulumSwingup-v1', 'QuadrupedRun-v1', 'QuadrupedWalk-v1', 'ReacherHard-v1',
        'SwimmerSwimmer6-v1', 'WalkerRun-v1'),
    # Young and Tian 2019 (1903.03176), as gymnax has them.
    '@minatar': (
        'gymnax:Asterix-MinAtar', 'gymnax:Breakout-MinAtar', 'gymnax:Freeway-MinAtar',
        'gymnax:Seaquest-MinAtar', 'gymnax:SpaceInvaders-MinAtar'),
}
