"""The published scores, against numbers copied by hand from their sources."""

import envpool
import gymnax
import pytest

from podracer_jit import task_sets


def scores(task):
  return {(score.title, score.steps): (score.score, score.deviation)
          for score in task_sets.published(task)}


def test_human_scores_cover_57_games_of_envpool():
  bounds = task_sets.human_scores()
  assert len(bounds) == 57
  assert set(bounds) <= set(envpool.list_all_envs())
  assert all(human > random for random, human in bounds.values())


@pytest.mark.quick
@pytest.mark.parametrize('name, size', [
    ('@atari57', 57), ('@atari5', 5), ('@nappo6', 6), ('@mujoco9', 9), ('@dmc15', 15),
    ('@minatar', 5)])
def test_the_tasks_of_a_set_exist(name, size):
  tasks = task_sets.TASKS[name]
  assert len(set(tasks)) == len(tasks) == size
  known = {*envpool.list_all_envs(), *(f'gymnax:{env}' for env in gymnax.registered_envs)}
  assert set(tasks) <= known


def test_published_scores_are_those_of_their_sources():
  pong = scores('Pong-v5')
  assert pong['Ape-X DQN', None] == (20.9, None)  # 1803.00933, table 2
  assert scores('Breakout-v5')['CleanRL PQN on EnvPool', 10_000_000] == (385, 12)
  # 2007.02622, table 1, column "Original".
  assert [scores(task)['PPO (openai/baselines)', 10_000_000][0]
          for task in task_sets.TASKS['@nappo6']] == [758.3, 32.5, 94.6, 20.7, -4.2, 32689]
  cheetah = scores('HalfCheetah-v4')
  assert cheetah['CleanRL PPO', 1_000_000] == (1442.64, 46.03)
  # Sources without a version stand for all of them; CleanRL's is of v4 alone.
  assert cheetah['tianshou SAC', 1_000_000] == (12139, None)
  assert ('CleanRL PPO', 1_000_000) not in scores('HalfCheetah-v5')
  assert ('tianshou SAC', 1_000_000) in scores('HalfCheetah-v5')
  assert not scores('CartPole-v1')


def test_each_score_has_a_source_and_each_source_a_score():
  used = {row['source'] for row in task_sets._rows('published_scores.csv')}
  rows = [*task_sets._rows('published_sources.csv')]
  assert used == {row['source'] for row in rows}
  assert all(row['title'] and row['protocol'] and row['reference'] for row in rows)


def test_a_result_is_compared_with_its_algorithm_at_a_similar_number_of_steps():
  def title(*args):
    return task_sets.nearest(*args).title
  assert title('Breakout-v5', 'ppo', 9_000_000) == 'CleanRL PPO (EnvPool)'
  assert 'A100' in title('Breakout-v5', 'ppo', 50_000_000)
  assert title('Breakout-v5', 'dqn', 1_000_000) == 'Ape-X DQN'
  assert title('Ant-v4', 'sac', 1_000_000) == 'tianshou SAC'
  assert task_sets.nearest('CartPole-v1', 'ppo', 1) is None


def test_human_normalised_by_hand():
  assert task_sets.normalised('Breakout-v5', 30.5) == pytest.approx(1.0)
  assert task_sets.normalised('Breakout-v5', 1.7 + 14.4) == pytest.approx(0.5)
  assert task_sets.normalised('CartPole-v1', 500) is None
