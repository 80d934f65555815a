"""Evaluation: which episodes count, statistics, videos, and errors of the command."""

import contextlib
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import envpool
import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit import api, experiment, losses, task_sets
from podracer_jit.cli import evaluate as command
from podracer_jit.envs import envpool_envs, families
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import build
from podracer_jit.losses import IMPALA
from podracer_jit.losses.algorithm import Acted
from podracer_jit.play import evaluation, video
from podracer_jit.runtime import host
from podracer_jit.workdir import checkpoints, files, journal, record
from tests import processes
from tests.made import Function, bound
from tests.runs import fresh, open_workdir

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = 2**31 - 1


def _lean(params, obs):
  """A policy for CartPole: push to where the pole leans. It falls after some dozen steps."""
  del params
  return jnp.stack([-obs[:, 2], obs[:, 2]], axis=-1), jnp.zeros(len(obs))


def _always(action, num_actions):
  def apply(params, obs):
    del params
    return jnp.tile(jax.nn.one_hot(action, num_actions), (len(obs), 1)), jnp.zeros(len(obs))
  return apply


def _agent(task, apply, **options):
  spec = envpool_envs.make_spec('CartPole-v1' if task == 'Odd-v0' else task, options)
  spec = spec._replace(task=task)
  return evaluation.Player(
      spec, options, bound(IMPALA(), Function(apply, {}), spec=spec), {}, jax.devices()[0],
      threads=2, update=0, steps=0, greedy=True)


def _pool(task, seeds, **options):
  return envpool.make(task, env_type='gymnasium', num_envs=len(seeds), batch_size=len(seeds),
                      seed=seeds, num_threads=1, **options)


def _episodes(task, seed, count, act, **options):
  """Plays one environment in Python; returns (return, length) of its first episodes."""
  pool = _pool(task, [seed], **options)
  episodes = []
  for _ in range(count):
    obs, _ = pool.reset() if not episodes else pool.step(np.zeros(1, np.int32))[::4]
    episode_return = 0.0
    length = 0
    ended = False
    while not ended:
      action = np.array([act(obs[0], length)], np.int32)
      obs, reward, terminated, truncated, info = pool.step(action)
      ended = bool(info['terminated'][0] if 'lives' in info else terminated[0])
      ended |= bool(truncated[0])
      episode_return += float(info.get('reward', reward)[0])
      length += 1
    episodes.append((episode_return, length))
  pool.close()
  return episodes


def _save(workdir, config, *updates):
  """Makes a workdir with a checkpoint for each update; it adds the update to the parameters."""
  config = config.to_dict()
  open_workdir(workdir, config)
  state = fresh(config).initial_state()
  with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
    for update in updates:
      saved.save(build.Snapshot(state._replace(
          update=jnp.int32(update), steps=jnp.int32(10 * update),
          params=jax.tree.map(lambda x, u=update: x + u, state.params))), {})
  return state.params


def _edit(workdir, **fields):
  """Sets fields of a run's config.json."""
  path = workdir / 'config.json'
  saved = json.loads(path.read_text())
  saved['config'] |= fields
  path.write_text(json.dumps(saved))


def _catch_config():
  config = experiment.config('impala', 'mlp', 'adam')
  config.env.task = 'Catch-v0'
  return config


@pytest.fixture
def evaluate(monkeypatch, capsys):
  """Returns a function that runs the command in this process: (exit code, stderr)."""
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)

  def run(*argv):
    code = command.main(['podracer_jit evaluate', *map(str, argv)])
    return code, capsys.readouterr().err

  return run


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Trains and evaluates with the real commands; returns the workdir and the evaluation."""
  tmp = tmp_path_factory.mktemp('trained')

  def run(*command):
    return processes.run([sys.executable, '-P', *command], cwd=tmp)

  train = run('-m', 'podracer_jit', '--config=configs/impala_catch.py:smoke', '--workdir=run',
              '--config.log.tensorboard=false')
  assert train.returncode == 0, train.stderr
  return tmp / 'run', run('-m', 'podracer_jit', 'evaluate', '--workdir=run', '--num_episodes=7',
                          '--num_envs=3', '--video=mp4')


def test_the_command_evaluates_a_trained_run(trained):
  workdir, done = trained
  assert done.returncode == 0, done.stderr
  assert 'Warning' not in done.stderr
  record = json.loads((workdir / 'evaluation.json').read_text())
  last = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[-1])
  assert (record['update'], record['steps']) == (last['update'], last['steps'])
  assert len(record['returns']) == 7 and record['lengths'] == [9] * 7
  assert (record['seed'], record['greedy'], record['num_envs']) == (1, False, 3)
  assert record['statistics']['mean'] == pytest.approx(np.mean(record['returns']))
  assert '7 episodes' in done.stdout and f'{np.mean(record["returns"]):.2f}' in done.stdout
  assert imageio_ffmpeg.count_frames_and_secs(workdir / 'video.mp4')[0] == 10
  assert '10 frames' in done.stdout


@pytest.mark.parametrize('num_episodes, num_envs', [(11, 4), (3, 8), (5, 1)])
def test_the_first_episodes_of_each_environment_count(num_episodes, num_envs):
  """Compares with one environment at a time in Python; lengths vary, so a race would show."""
  limit = 50
  agent = _agent('CartPole-v1', _lean, max_episode_steps=limit)
  settings = evaluation.Settings(num_episodes, num_envs, seed=3, max_steps=limit)
  played = evaluation.play(agent, settings)
  num_envs = min(num_envs, num_episodes)
  expected = []
  for i, seed in enumerate(evaluation.seeds(3, num_envs)):
    count = len(range(i, num_episodes, num_envs))
    expected += _episodes('CartPole-v1', seed, count, lambda obs, t: int(obs[2] > 0),
                          max_episode_steps=limit)
  assert len(expected) == num_episodes
  assert list(zip(*played, strict=True)) == expected
  assert len(set(played.lengths)) > 1


def test_a_recurrent_policy_remembers_until_the_episode_ends():
  """The policy counts its steps and pushes left and right in turn, left first in each episode."""
  class Counts(IMPALA):
    def initial_carry(self, num_envs):
      return jnp.zeros((num_envs, 1))

    def act(self, params, obs, carry, valid, key, exploration):
      push = jax.nn.one_hot(carry[:, 0].astype(int) % 2, 2)
      return Acted(self.parts.policy.mode(push), None, jnp.where(valid[:, None], carry + 1, 0),
                   push)

  agent = _agent('CartPole-v1', _lean)
  agent = agent._replace(algorithm=bound(Counts(), spec=agent.spec))
  played = evaluation.play(agent, evaluation.Settings(12, 4, seed=3, max_steps=500))
  expected = [episode for seed in evaluation.seeds(3, 4)
              for episode in _episodes('CartPole-v1', seed, 3, lambda obs, t: t % 2)]
  assert list(zip(*played, strict=True)) == expected
  assert len(set(played.lengths)) > 1


def test_evaluations_play_whole_games_with_unclipped_rewards(tmp_path):
  """Training ended episodes at each lost life and clipped rewards."""
  config = experiment.config('impala', 'nature_cnn', 'adam', unroll_length=2)
  config.env.update(task='SpaceInvaders-v5', num_envs=1, episodic_life=True, reward_clip=True,
                    img_height=42, img_width=42, repeat_action_probability=0.25)
  config.network.hidden = 8
  config.network.update(channels=(4,), kernels=(8,), strides=(8,))
  _save(tmp_path, config, 1)
  agent = evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path))
  assert agent.options['repeat_action_probability'] == 0.25
  algorithm = bound(IMPALA(), Function(_always(1, 6), {}), spec=agent.spec)
  agent = agent._replace(algorithm=algorithm, params={}, greedy=True)
  played = evaluation.play(agent, evaluation.Settings(2, 2, seed=0, max_steps=30_000))
  expected = []
  for seed in evaluation.seeds(0, 2):
    expected += _episodes('SpaceInvaders-v5', seed, 1, lambda obs, t: 1, img_height=42,
                          img_width=42, repeat_action_probability=0.25)
  assert list(zip(*played, strict=True)) == expected


def test_actions_are_sampled_unless_greedy():
  """With logits 0 and 1 the greedy policy always pushes right, and falls in 8 to 10 steps."""
  right = _always(1, 2)
  agent = _agent('CartPole-v1', right)
  sampling = agent._replace(greedy=False)
  greedy = evaluation.play(agent, evaluation.Settings(8, 8, seed=0, max_steps=500))
  sampled = evaluation.play(sampling, evaluation.Settings(8, 8, seed=0, max_steps=500))
  assert all(8 <= length <= 10 for length in greedy.lengths)
  assert max(sampled.lengths) > 10
  assert evaluation.play(sampling, evaluation.Settings(8, 8, seed=0, max_steps=500)) == sampled
  assert evaluation.play(sampling, evaluation.Settings(8, 8, seed=1, max_steps=500)) != sampled


def test_an_evaluation_has_an_epsilon_of_its_own():
  """An epsilon-greedy policy that pushes right; Ape-X's figure 7 is of such an actor."""
  spec = envpool_envs.make_spec('CartPole-v1', {})
  algorithm = bound(losses.DQN(), Function(_always(1, 2), {}), spec=spec)
  agent = evaluation.Player(spec, {}, algorithm, {}, jax.devices()[0], threads=2, update=0, steps=0)
  settings = evaluation.Settings(8, 8, seed=0, max_steps=500)
  lengths = {epsilon: evaluation.play(evaluation.exploring(agent, False, epsilon), settings).lengths
             for epsilon in (0.0, 1e-6, 1.0)}
  assert all(8 <= length <= 10 for length in lengths[0.0])
  assert lengths[1e-6] == lengths[0.0]
  # Random actions are those of epsilon = 1 in training: about 22 steps, and 8 to 10 none.
  assert np.mean(lengths[1.0]) > 13
  for wrong in (1.5, float('nan'), 'x'):
    with pytest.raises(ValueError, match='^epsilon: must be between 0 and 1'):
      evaluation.exploring(agent, False, wrong)
  with pytest.raises(ValueError, match=r'^epsilon: a greedy evaluation takes no random action'):
    evaluation.exploring(agent, True, 0.1)
  of_policy = _agent('CartPole-v1', _always(1, 2))
  with pytest.raises(ValueError, match=r'^epsilon: IMPALA explores in another way'):
    evaluation.exploring(of_policy, False, 0.1)


def test_an_episode_without_end_is_an_error():
  agent = _agent('MountainCar-v0', _always(1, 3), max_episode_steps=ENDLESS)
  with pytest.raises(RuntimeError, match='256 steps into an episode, and max_steps is 200'):
    evaluation.play(agent, evaluation.Settings(1, 1, seed=0, max_steps=200))
  # Also if it ends before anybody looks.
  agent = _agent('MountainCar-v0', _always(1, 3), max_episode_steps=120)
  with pytest.raises(RuntimeError, match='120 steps into an episode, and max_steps is 100'):
    evaluation.play(agent, evaluation.Settings(1, 1, seed=0, max_steps=100))


def test_seeds_of_evaluations_are_not_those_of_training():
  for seed in (0, 1, 12345):
    seeds = evaluation.seeds(seed, 2000)
    assert len(set(seeds)) == 2000
    assert all(-2**31 <= s < -1 for s in seeds)
    for segment in (0, 1, 999):
      assert not set(seeds) & set(env_seeds(seed, segment, 0, 2000))
  assert evaluation.seeds(0, 9) != evaluation.seeds(1, 9)


def test_seeds_are_not_minus_one_and_have_32_bits(monkeypatch):
  monkeypatch.setattr(evaluation, 'env_seeds', lambda *args: [0, 7, 2**31 - 1])
  assert evaluation.seeds(0, 3) == [-2, -9, -2**31]


def test_statistics_by_hand():
  statistics = evaluation.statistics('CartPole-v1', evaluation.Episodes([1, 2, 3, 6], [1, 1, 1, 2]))
  # Deviations from 3 are -2, -1, 0, 3: variance 14 / 3, over 4 episodes.
  assert statistics == pytest.approx(dict(
      mean=3, standard_error=(14 / 3 / 4) ** 0.5, min=1, median=2.5, max=6, mean_length=1.25))
  assert evaluation.statistics('CartPole-v1', evaluation.Episodes([5], [1]))[
      'standard_error'] is None


@pytest.mark.parametrize('wrong', [float('nan'), float('inf'), float('-inf')])
def test_returns_that_are_not_finite_have_no_mean_but_an_error(wrong):
  statistics = evaluation.statistics('Breakout-v5', evaluation.Episodes([1.0, wrong], [1, 3]))
  assert statistics['mean'] is None and statistics['human_normalised'] is None
  assert statistics['mean_length'] == 2
  assert statistics['error'] == ('Breakout-v5: the returns of 1 of 2 episodes are not finite, '
                                 f'such as {wrong}; all rewards must be finite')
  assert json.loads(json.dumps(statistics, allow_nan=False)) == statistics


def test_human_normalised_score_by_hand():
  """Breakout has a random score of 1.7 and a human score of 30.5, so a point is 1 / 28.8."""
  episodes = evaluation.Episodes([1.7, 30.5, 1.7 + 2 * 28.8], [1, 1, 1])
  assert evaluation.statistics('Breakout-v5', episodes)['human_normalised'] == pytest.approx(1.0)
  episodes = evaluation.Episodes([-20.7 + 35.3 / 2], [1])  # Pong: from -20.7 to 14.6
  assert evaluation.statistics('Pong-v5', episodes)['human_normalised'] == pytest.approx(0.5)


def test_restore_reads_the_newest_parameters(tmp_path):
  params = _save(tmp_path, _catch_config(), 3, 5)
  before = sorted(tmp_path.rglob('*'))
  agent = evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path))
  assert sorted(tmp_path.rglob('*')) == before
  assert (agent.update, agent.steps) == (5, 50)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 5), agent.params, params)


def test_restore_reads_a_run_of_more_devices_than_this_machine_has(tmp_path):
  config = _catch_config()
  _save(tmp_path, config, 1)
  other_machine = dict(actor_devices=[30, 31], learner_devices=[28, 29], actor_platform='gpu')
  _edit(tmp_path, placement=config.placement.to_dict() | other_machine, num_shards=4,
        num_grad_shards=2)
  assert evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path)).update == 1


def _workdir(tmp, kind):
  """Makes a workdir that cannot be evaluated."""
  if kind == 'missing':
    return tmp / 'nowhere'
  if kind == 'not a config':
    (tmp / 'config.json').write_text('[1, 2]')
  elif kind == 'lacks a field':
    (tmp / 'config.json').write_text('{"config": {"placement": {}}}')
  elif kind == 'nothing saved':
    _save(tmp, _catch_config())
  elif kind == 'of other parameters':
    _save(tmp, _catch_config(), 1)
    _edit(tmp, network=_catch_config().to_dict()['network'] | {'hidden': [5]})
  return tmp


def test_any_change_of_a_stored_config_is_accepted_or_refused_in_one_line(tmp_path):
  """Sets fields of a config.json to arbitrary values."""
  rng = random.Random(3)
  text = json.dumps(dict(config=_catch_config().to_dict(), versions={}))
  values = [None, 5, -1, 2**40, 1e300, 'x', 'mine:Y', [], [1], [[1]], {}, {'a': 1}, True, '', 0]
  refused = 0
  for _ in range(150):
    record = json.loads(text)
    fields = record['config']
    name = rng.choice(list(fields))
    if isinstance(fields[name], dict) and rng.random() < 0.7:
      fields = fields[name]
      name = rng.choice(list(fields))
    fields[name] = rng.choice(values)
    (tmp_path / 'config.json').write_text(json.dumps(record))
    try:
      evaluation.read_experiment(tmp_path)
    except ValueError as error:
      refused += 1
      assert '\n' not in str(error) and str(error).startswith('--workdir: '), error
  assert refused > 75


@pytest.mark.parametrize('kind, message', [
    ('missing', 'does not exist'), ('empty', 'no config.json'),
    ('not a config', 'not of a run of podracer_jit'), ('lacks a field', 'loss.name: is missing'),
    ('nothing saved', 'no checkpoint yet'),
    ('of other parameters', 'cannot read the checkpoint of update')])
def test_a_workdir_without_a_run_is_refused_in_one_line(tmp_path, evaluate, kind, message):
  workdir = _workdir(tmp_path, kind)
  before = sorted(tmp_path.rglob('*'))
  code, errors = evaluate(f'--workdir={workdir}')
  assert code == 2
  assert errors.startswith('podracer_jit evaluate: --workdir: ') and errors.count('\n') == 1, errors
  assert message in errors and 'Traceback' not in errors
  assert sorted(tmp_path.rglob('*')) == before


@pytest.mark.parametrize('flag', [
    '--num_episodes=0', '--num_envs=0', '--max_steps=0', '--num_episodes=many', '--seed=-1',
    '--video=film.avi', '--nonsense', 'nonsense', '--workdir='])
def test_bad_flags_are_refused_in_one_line(tmp_path, evaluate, flag):
  code, errors = evaluate(f'--workdir={tmp_path}', flag)
  assert code == 2
  assert errors.startswith('podracer_jit evaluate: ') and errors.count('\n') == 1, errors
  assert flag.strip('-').split('=')[0] in errors


def test_a_failure_while_playing_is_one_line_and_exit_code_1(tmp_path, evaluate):
  _save(tmp_path, _catch_config(), 1)
  code, errors = evaluate(f'--workdir={tmp_path}', '--max_steps=1', '--num_episodes=1000')
  assert code == 1
  assert errors.count('\n') == 1 and 'max_steps is 1' in errors
  assert not (tmp_path / 'evaluation.json').exists()


def _cart_config():
  config = experiment.config('impala', 'mlp', 'adam')
  config.env.task = 'CartPole-v1'
  return config


PLAY = ['--num_episodes=3', '--num_envs=2']


def test_each_evaluation_is_a_line_and_the_newest_is_whole(tmp_path, evaluate, capsys):
  _save(tmp_path, _cart_config(), 1, 2)
  records = []
  for flags in (['--seed=5', '--env.max_episode_steps=4'],
                ['--update=1', '--greedy', '--env.max_episode_steps', '6']):
    assert evaluate(f'--workdir={tmp_path}', *PLAY, *flags) == (0, '')
    records.append(json.loads((tmp_path / 'evaluation.json').read_text()))
  assert [record.pop('lengths') for record in records] == [[4] * 3, [6] * 3]
  assert [record.pop('returns') for record in records] == [[4.0] * 3, [6.0] * 3]
  lines = [json.loads(line) for line in (tmp_path / 'evaluate.jsonl').read_text().splitlines()]
  assert lines == records
  first, second = lines
  assert (first['update'], first['seed'], first['greedy']) == (2, 5, False)
  assert (second['update'], second['seed'], second['greedy']) == (1, 1, True)
  assert [line['env'] for line in lines] == [{'max_episode_steps': 4}, {'max_episode_steps': 6}]
  assert (first['num_episodes'], first['num_envs'], first['max_steps']) == (3, 2, 108_000)
  assert first['versions'] == record.versions() and {'podracer_jit', 'jax', 'envpool'} <= set(
      first['versions'])
  assert first['host'] and first['time'] <= second['time'] and first['time'].endswith('+00:00')
  assert not list(tmp_path.glob('*.tmp'))


def test_the_record_of_an_evaluation_has_its_epsilon(tmp_path, evaluate, capsys):
  config = experiment.config('dqn', 'mlp', 'adam', scheme='sync')
  config.env.task = 'CartPole-v1'
  config.replay.update(dict(capacity=2560, min_size=100))
  _save(tmp_path, config, 1)
  for flags, epsilon, words in (([], 0.0, 'greedy actions'), (
      ['--epsilon=0.25'], 0.25, 'epsilon-greedy actions (epsilon = 0.25)')):
    assert command.main(['evaluate', f'--workdir={tmp_path}', *PLAY, *flags]) == 0
    record = json.loads((tmp_path / 'evaluation.json').read_text())
    assert (record['epsilon'], record['greedy']) == (epsilon, not epsilon)
    assert words in capsys.readouterr().out
  assert evaluate(f'--workdir={tmp_path}', '--epsilon=0.25', '--greedy') == (
      2, 'podracer_jit evaluate: epsilon: a greedy evaluation takes no random action; must be 0, '
      'got 0.25\n')


def test_the_published_score_of_the_task_is_printed_with_its_protocol(tmp_path, evaluate, capsys):
  config = experiment.config('ppo', 'mlp', 'adam')
  config.env.task = 'InvertedPendulum-v4'
  _save(tmp_path, config, 1)
  assert command.main(['podracer_jit evaluate', f'--workdir={tmp_path}', *PLAY]) == 0
  (line,) = [line for line in capsys.readouterr().out.splitlines() if 'published' in line]
  nearest = task_sets.nearest('InvertedPendulum-v4', 'ppo', 10)
  assert line == f'published  {nearest.words()}'
  assert nearest.title == 'CleanRL PPO' and nearest.protocol in line and nearest.reference in line
  # A task without one gets no such line.
  _save(tmp_path / 'cart', _cart_config(), 1)
  assert command.main(['podracer_jit evaluate', f'--workdir={tmp_path / "cart"}', *PLAY]) == 0
  assert 'published' not in capsys.readouterr().out


def test_the_record_of_other_tasks_has_the_versions_of_their_libraries():
  assert families.libraries_of('Pong-v5') == []
  assert families.libraries_of('gymnax:CartPole-v1') == ['gymnax']
  assert families.libraries_of('gymnasium:ale_py.x:ALE/Pong-v5') == ['gymnasium', 'ale_py']
  assert families.libraries_of('mine.envs:Env') == ['mine', 'gymnasium']
  assert set(record.versions('gymnasium', 'mine')) == {*record.versions(), 'gymnasium'}


@pytest.mark.parametrize('flag, message', [
    ('--env.max_episod_steps=3', 'env.max_episod_steps: not an option of CartPole-v1; did you mean '
                                 'env.max_episode_steps?'),
    ('--env.max_episode_steps=0', 'env.max_episode_steps: must be at least 1, got 0'),
    ('--env.max_episode_steps=x', "env.max_episode_steps: must be of type int, got 'x'"),
    ('--env.max_episode_steps', '--env.max_episode_steps: has no value'),
    ('--env.task=Catch-v0', '--env.task: cannot be changed here'),
    ('--env.num_envs=3', '--env.num_envs: cannot be changed here')])
def test_options_of_the_task_are_checked_before_playing(flag, message, tmp_path, evaluate):
  _save(tmp_path, _cart_config(), 1)
  code, errors = evaluate(f'--workdir={tmp_path}', flag)
  assert code == 2 and errors.startswith(f'podracer_jit evaluate: {message}')
  assert errors.count('\n') == 1


def test_options_that_the_policy_cannot_play_with_are_refused(tmp_path, evaluate):
  _save(tmp_path, _catch_config(), 1)
  code, errors = evaluate(f'--workdir={tmp_path}', '--env.height=12')
  assert code == 2 and errors.count('\n') == 1
  assert 'env.height: the policy was trained with obs_shape = ' in errors
  assert 'of Catch-v0, which would be ' in errors


def test_the_function_takes_options_of_the_task(tmp_path, monkeypatch):
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)
  _save(tmp_path, _cart_config(), 1)
  agent = api.load(tmp_path)
  before = sorted(tmp_path.rglob('*'))
  assert api.evaluate(agent, 3, env={'max_episode_steps': 4}).lengths == [4] * 3
  assert max(api.evaluate(agent, 3).lengths) > 4
  for env, message in (({'height': 3}, 'env.height: not an option of CartPole-v1'),
                       ({'task': 'Catch-v0'}, 'env.task: cannot be changed here'),
                       ({'num_envs': 3}, 'env.num_envs: cannot be changed here')):
    with pytest.raises(ValueError, match=message):
      api.evaluate(agent, 3, env=env)
  assert sorted(tmp_path.rglob('*')) == before


def test_an_older_checkpoint_is_played_with_a_line_about_the_broken_one(tmp_path, evaluate, caplog,
                                                                        monkeypatch):
  _save(tmp_path, _cart_config(), 3, 5)
  broken = next(path for path in (tmp_path / 'checkpoints' / '5' / 'state').rglob('*')
                if path.is_file())
  broken.write_bytes(broken.read_bytes() + b' ')
  note = rf'cannot use the checkpoint of update 5 \(.*{broken.name}.*\); takes update 3\n'
  code, errors = evaluate(f'--workdir={tmp_path}', *PLAY)
  assert code == 0 and re.fullmatch(f'podracer_jit evaluate: {note}', errors), errors
  assert json.loads((tmp_path / 'evaluation.json').read_text())['update'] == 3
  assert evaluate(f'--workdir={tmp_path}', '--update=3', *PLAY) == (0, '')  # asked for
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)
  assert api.load(tmp_path).update == 3
  (logged,) = caplog.records
  assert logged.name == 'podracer_jit.api' and re.fullmatch(note, logged.getMessage() + '\n')
  (tmp_path / 'checkpoints' / '5' / 'manifest.json').unlink()
  assert evaluation.broken_note(tmp_path, 3).startswith(
      'cannot use the checkpoint of update 5 (manifest.json is missing: it was cut, or saved by ')


@pytest.mark.parametrize('what', ['folder', 'file', 'link', 'pipe'])
def test_a_result_that_cannot_be_written_is_printed(what, evaluate, monkeypatch):
  out = io.StringIO()
  monkeypatch.setattr(sys, 'stdout', out)
  if what != 'folder':  # one real evaluation is enough
    monkeypatch.setattr(evaluation, 'play', lambda *args: evaluation.Episodes([1.0] * 3, [1] * 3))
  # Not in pytest's folder, into which other users cannot look.
  with tempfile.TemporaryDirectory() as name:
    workdir = Path(name)
    _save(workdir, _cart_config(), 1)
    (workdir / 'elsewhere').write_text('mine')
    lines = workdir / 'evaluate.jsonl'
    match what:
      case 'folder':
        workdir.chmod(0o555)
      case 'file':
        lines.touch(0o444)
        workdir.chmod(0o777)
      case 'link':
        lines.symlink_to(workdir / 'elsewhere')
      case 'pipe':
        os.mkfifo(lines)
    before = {*workdir.rglob('*')}
    with (contextlib.nullcontext() if what in ('link', 'pipe')
          else processes.as_a_user_that_is_not_root()):
      code, errors = evaluate(f'--workdir={workdir}', *PLAY)
    assert code == 0 and errors.count('\n') == 1, errors
    assert re.match(f'podracer_jit evaluate: cannot write the result to {lines}: ', errors)
    assert '3 episodes, sampled actions' in out.getvalue()
    newest = workdir / 'evaluation.json'  # is written even if the line cannot be
    assert {*workdir.rglob('*')} - before == ({newest} if what != 'folder' else set())
    assert (workdir / 'elsewhere').read_text() == 'mine'
    workdir.chmod(0o700)


WRITES = '''
import json, sys
from pathlib import Path
from podracer_jit.workdir import files
folder = Path(sys.argv[1])
for i in range(200):
  line = json.dumps([sys.argv[2], i, 'x' * 10_000])
  files.append_line(folder / 'lines', line)
  files.write(folder / 'newest', line, is_shared=True)
'''


def test_two_processes_write_at_once(tmp_path):
  writers = [subprocess.Popen([sys.executable, '-P', '-c', WRITES, tmp_path, name])
             for name in 'ab']
  assert [writer.wait(100) for writer in writers] == [0, 0]
  lines = [json.loads(line) for line in (tmp_path / 'lines').read_text().split('\n') if line]
  for name in 'ab':
    assert [i for writer, i, _ in lines if writer == name] == list(range(200))
  assert json.loads((tmp_path / 'newest').read_text())[1] == 199
  assert sorted(path.name for path in tmp_path.iterdir()) == ['lines', 'newest']


def test_a_line_that_a_full_disk_has_cut_spoils_no_other(tmp_path):
  path = tmp_path / 'lines'
  files.append_line(path, '{"a": 1}')
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, limits[1]))
    for _ in range(2):
      with pytest.raises(OSError, match=str(path)):
        files.append_line(path, '{"a": 2}')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  files.append_line(path, '{"a": 3}')
  assert [line['a'] for line in journal.read_lines(path)] == [1, 3]


def test_a_link_in_place_of_a_draft_is_not_followed(tmp_path):
  (tmp_path / 'mine').write_text('mine')
  (tmp_path / 'x.json.tmp').symlink_to(tmp_path / 'mine')
  files.write(tmp_path / 'x.json', 'new')
  assert (tmp_path / 'mine').read_text() == 'mine'
  assert (tmp_path / 'x.json').read_text() == 'new' and not (tmp_path / 'x.json').is_symlink()


def _decode(path, width, height):
  """Returns the frames [T, H, W, 3] of a video, and its frames per second."""
  # imageio_ffmpeg.read_frames would fork this process, which has JAX's threads.
  ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
  raw = subprocess.run([ffmpeg, '-loglevel', 'error', '-i', path, '-fps_mode', 'passthrough',
                        '-f', 'rawvideo', '-pix_fmt', 'rgb24', '-'], capture_output=True,
                       check=True).stdout
  frames, seconds = imageio_ffmpeg.count_frames_and_secs(path)
  return np.frombuffer(raw, np.uint8).reshape(frames, height, width, 3), frames / seconds


def test_a_checkpoint_deleted_during_the_listing_is_no_error(tmp_path, monkeypatch):
  """Orbax raises this error if a training run deletes an old checkpoint at that moment."""
  _save(tmp_path, _catch_config(), 1)
  opened = []

  class Vanishing(checkpoints.Checkpoints):
    def __init__(self, *args, **kwargs):
      opened.append(self)
      if len(opened) == 1:
        raise FileNotFoundError(2, 'No such file or directory', 'checkpoints/5')
      super().__init__(*args, **kwargs)

  monkeypatch.setattr(checkpoints, 'Checkpoints', Vanishing)
  assert evaluation.restore(tmp_path, evaluation.read_experiment(tmp_path)).update == 1
  assert len(opened) == 2


def test_a_gif_has_the_frames_that_envpool_renders(tmp_path):
  """Compares frame by frame with a pool in Python; a GIF of few colours is exact."""
  agent = _agent('Pong-v5', _always(2, 6), max_episode_steps=20, frame_skip=4)
  film = video.film(agent, tmp_path / 'pong.gif', evaluation.Settings(3, 3, 1, 100))
  pool = _pool('Pong-v5', evaluation.seeds(1, 4)[3:], max_episode_steps=20,
               render_mode='rgb_array')
  pool.reset()
  expected = [pool.render()[0]]
  rewards = 0.0
  for _ in range(20):
    rewards += pool.step(np.array([2], np.int32))[1][0]
    expected.append(pool.render()[0])
  frames, rate = _decode(tmp_path / 'pong.gif', 480, 630)
  assert film == video.Film(rewards, 21, 15.0, 'rendered by the environment')
  assert len(frames) == 21
  np.testing.assert_array_equal(frames[:, 1::3, 1::3], np.stack(expected))
  assert len({frame.tobytes() for frame in expected}) > 5  # the picture moves
  assert rate == pytest.approx(15, rel=0.02)


@pytest.mark.parametrize('task, apply, options, rate, size', [
    ('Pong-v5', _always(2, 6), dict(max_episode_steps=9, frame_skip=5), 12, (480, 630)),
    ('Breakout-v5', _always(1, 4), dict(max_episode_steps=9), 15, (480, 630)),
    ('CartPole-v1', _lean, dict(max_episode_steps=9), 50, (600, 400)),
    ('Catch-v0', _always(1, 3), {}, 10, (240, 480))])
def test_an_mp4_has_every_frame_at_the_tasks_speed(tmp_path, task, apply, options, rate, size):
  film = video.film(_agent(task, apply, **options), tmp_path / 'x.mp4',
                    evaluation.Settings(1, 1, 0, 100))
  frames, decoded_rate = _decode(tmp_path / 'x.mp4', *size)
  assert film.frames == len(frames) == 10
  assert film.frame_rate == rate == pytest.approx(decoded_rate, rel=0.02)
  assert frames.std() > 1 and (frames[0] != frames[-1]).any()


def test_without_a_renderer_a_picture_is_the_newest_frame():
  planes = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
  np.testing.assert_array_equal(video._picture(planes, colour=False)[..., 1], planes[3])
  np.testing.assert_array_equal(video._picture(planes, colour=True)[..., 0], planes[1])
  last = planes.transpose(1, 2, 0)
  for colour in (False, True):
    np.testing.assert_array_equal(video._picture(last, colour, channels_last=True),
                                  video._picture(planes, colour))
  board = np.array([[0.0, 1.0], [0.5, 0.0]], np.float32)
  np.testing.assert_array_equal(video._picture(board, colour=False)[..., 2], [[0, 255], [127, 0]])


def test_a_task_without_pictures_has_no_video():
  class Blind:
    first_obs = np.zeros((1, 4), np.float32)

    def render(self, state):
      raise RuntimeError('render not implemented for this environment')

  one_env = types.SimpleNamespace(envs=[types.SimpleNamespace(simulator=None)])
  with pytest.raises(ValueError, match='no video: Odd-v0 cannot be rendered'):
    video._camera(_agent('Odd-v0', _lean), Blind(), one_env)


ONE_ENV = types.SimpleNamespace(envs=[types.SimpleNamespace(simulator=None)])
GREY = np.full((4, 6, 3), 128, np.uint8)


class Draws:
  """An environment of any family that returns or raises the given values, one after the other."""

  def __init__(self, *values, obs_shape=(4,)):
    self.values = list(values)
    self.first_obs = np.zeros((1, *obs_shape), np.uint8)

  def render(self, state):
    value = self.values.pop(0)
    if isinstance(value, Exception):
      raise value
    return value


@pytest.mark.parametrize('value, message', [
    (np.zeros((4, 6, 4), np.uint8), r'render\(\) of Odd-v0 returned uint8 of shape \(4, 6, 4\); a'),
    (np.full((4, 6, 3), 0.5), r'returned float64 of shape \(4, 6, 3\); a picture must be uint8'),
    (GREY.astype(np.int64), r'returned int64 of shape'), (GREY[..., 0], r'of shape \(4, 6\); a'),
    (GREY[..., :1], r'of shape \(4, 6, 1\); a'), (GREY[None], r'of shape \(1, 4, 6, 3\); a'),
    ([GREY, GREY], r'of shape \(2, 4, 6, 3\); a'), (GREY[:0], r'of shape \(0, 6, 3\); a'),
    ('+--+', r'returned <U4 of shape \(\); a'), (None, r'cannot be rendered .*returned None'),
    (TypeError('bad\nstate'), r'cannot be rendered \(TypeError: bad state\), and its observations'),
    (RuntimeError('no display'), r'cannot be rendered \(no display\), and its observations')])
def test_only_pictures_become_a_video(value, message):
  with pytest.raises(ValueError, match=f'^no video: .*{message}') as error:
    video._camera(_agent('Odd-v0', _lean), Draws(value), ONE_ENV)
  assert '\n' not in str(error.value)
  # The second picture may be the first that is wrong.
  take_frame, _ = video._camera(_agent('Odd-v0', _lean), Draws(GREY, GREY, value), ONE_ENV)
  assert take_frame(ONE_ENV).shape == (320, 480, 3)
  with pytest.raises(ValueError, match='^no video: '):
    take_frame(ONE_ENV)


def test_a_wrong_picture_is_not_replaced_by_the_observation():
  with pytest.raises(ValueError, match='^no video: render'):
    video._camera(_agent('Odd-v0', _lean), Draws(GREY / 255, obs_shape=(8, 8)), ONE_ENV)
  _, shown = video._camera(_agent('Odd-v0', _lean), Draws(None, obs_shape=(8, 8)), ONE_ENV)
  assert shown == 'the observations, since the task cannot be rendered'


def test_pictures_of_other_sizes_are_no_video():
  take_frame, _ = video._camera(_agent('Odd-v0', _lean), Draws(GREY, GREY[:3]), ONE_ENV)
  with pytest.raises(ValueError, match=r'^no video: render\(\) of Odd-v0 returned a picture of '
                                       r'shape \(3, 6, 3\) after one of shape \(4, 6, 3\); all'):
    take_frame(ONE_ENV)


def _write(path, frames):
  """Writes grey frames [T, H, W] as a video."""
  pictures = [video._enlarge(video._picture(frame, False)) for frame in frames]
  height, width, _ = pictures[0].shape
  with video._encoder(path, (width, height), 10) as out:
    for picture in pictures:
      out.write(picture)


@pytest.mark.parametrize('suffix', video.SUFFIXES)
def test_a_video_that_fails_leaves_the_old_file(tmp_path, suffix):
  path = tmp_path / f'x{suffix}'
  frames = np.zeros((3, 8, 8), np.uint8)
  _write(path, frames)
  old = path.read_bytes()
  with pytest.raises(RuntimeError, match='broken'), video._encoder(path, (480, 480), 10) as out:
    out.write(bytes(480 * 480 * 3 * 5))
    raise RuntimeError('broken')
  assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('height, width, size', [
    (101, 51, (506, 256)), (1, 601, (2, 602)), (601, 1, (602, 2)), (1, 1, (480, 480))])
def test_a_picture_of_any_size_is_a_frame_with_even_sides(tmp_path, height, width, size):
  picture = np.full((height, width, 3), 99, np.uint8)
  frame = video._enlarge(picture)
  assert frame.shape == (*size, 3) and (frame == 99).all()
  _write(tmp_path / 'x.mp4', np.full((3, height, width), 99, np.uint8))
  assert len(_decode(tmp_path / 'x.mp4', *size)[0]) == 3


CHATTY = """#!{python}
import sys
for _ in range(16):
  sys.stdin.buffer.read(480 * 480 * 3)
  sys.stderr.write('frame' + ' ' * 2**16)
sys.stderr.write('the last line')
sys.exit({code})
"""


@pytest.mark.parametrize('code', [0, 1])
def test_an_encoder_may_write_more_messages_than_a_pipe_takes(code, tmp_path, monkeypatch):
  encoder = tmp_path / 'ffmpeg'
  encoder.write_text(CHATTY.format(python=sys.executable, code=code))
  encoder.chmod(0o755)
  monkeypatch.setenv('IMAGEIO_FFMPEG_EXE', str(encoder))
  path = tmp_path / 'x.mp4'
  path.with_stem('x.tmp').touch()  # a real encoder would write it

  def write():
    _write(path, np.zeros((16, 480, 480), np.uint8))

  if code:
    with pytest.raises(OSError, match=r'ffmpeg could not write \S+: frame frame .*the last line$'):
      write()
  else:
    write()
  assert path.exists() != bool(code) and not path.with_stem('x.tmp').exists()


def test_a_video_that_cannot_be_written_is_an_error(tmp_path):
  agent = _agent('Catch-v0', _always(1, 3))
  with pytest.raises(OSError, match='could not write'):
    video.film(agent, tmp_path / 'nowhere' / 'x.mp4', evaluation.Settings(1, 1, 0, 100))


@pytest.mark.parametrize('name', ['-smoke.mp4', 'pong:smoke.mp4', 'with space.gif'])
def test_a_video_may_have_any_name(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with video._encoder(Path(name), (4, 4), 10.0) as frames:
    frames.write(bytes(4 * 4 * 3))
  assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_path_of_a_video_is_one_of_the_user(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert video.chosen_path('--video', '~/x.mp4', Path('run')) == tmp_path / 'x.mp4'
  with pytest.raises(ValueError, match='gs://bucket/x.mp4: is an address, not a path'):
    video.chosen_path('--video', 'gs://bucket/x.mp4', Path('run'))
