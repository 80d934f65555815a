"""Agents outside of a run: acting on NumPy arrays for all kinds of tasks, saving and loading."""

import copy
import json
import shutil
import warnings

import envpool
import gymnasium
import jax
import numpy as np
import pytest

from podracer_jit.cli import rerun
from podracer_jit.envs import spaces
from podracer_jit.envs.families import family_of
from podracer_jit.experiment import build, schema
from podracer_jit.experiment.resolve import resolve
from podracer_jit.play import agent as agent_lib
from podracer_jit.play import evaluation
from podracer_jit.training import opening
from podracer_jit.workdir import checkpoints
from podracer_jit.workdir.workdir import Request
from tests.runs import changed, fresh, open_workdir, small
from tests.tiers import essential


class Sizes(gymnasium.Env):
  """Actions are whole numbers from 5 to 7, observations are tuples."""

  observation_space = gymnasium.spaces.Tuple((
      gymnasium.spaces.Box(-1, 1, (2, 3), np.float32), gymnasium.spaces.Discrete(4, start=2)))
  action_space = gymnasium.spaces.Discrete(3, start=5)

  def reset(self, seed=None, options=None):
    """Draws an observation."""
    super().reset(seed=seed)
    self.observation_space.seed(seed)
    return self.observation_space.sample(), {}

  def step(self, action):
    """Takes the action, and draws an observation."""
    assert self.action_space.contains(action)
    return self.observation_space.sample(), 0.0, False, False, {}


class Switches(Sizes):
  """Actions are matrices of bits, observations are numbers."""

  observation_space = gymnasium.spaces.Discrete(5)
  action_space = gymnasium.spaces.MultiBinary((2, 3))


class Forces(Sizes):
  """Actions are float64, observations are nested dicts."""

  observation_space = gymnasium.spaces.Dict(
      b=gymnasium.spaces.Dict(x=gymnasium.spaces.Box(0, 255, (4,), np.uint8)),
      a=gymnasium.spaces.MultiDiscrete([3, 2]))
  action_space = gymnasium.spaces.Box(-2.0, 1.0, (3,), np.float64)


class Slight(Sizes):
  """Actions have bounds that are no 32-bit floats, observations are bits."""

  observation_space = gymnasium.spaces.MultiBinary((2, 2))
  action_space = gymnasium.spaces.Box(-0.1, 0.3, (3,), np.float64)


class Times(Sizes):
  """Observes numbers of 64 bits."""

  observation_space = gymnasium.spaces.Box(0, 2**62, (2,), np.int64)


class Flags(Sizes):
  """Observes an array of bools."""

  observation_space = gymnasium.spaces.Box(0, 1, (3,), bool)


class Counts(Switches):
  """Observations are dicts with a number."""

  observation_space = gymnasium.spaces.Dict(
      a=gymnasium.spaces.Discrete(3), b=gymnasium.spaces.Box(-1, 1, (2,), np.float32))


class Looks(Switches):
  """Observations are an image, alone in a dict."""

  observation_space = gymnasium.spaces.Dict(
      pixels=gymnasium.spaces.Box(0, 255, (3, 8, 8), np.uint8))


OWN_ENVS = {name: f'{__name__}:{name}'
            for name in ('Sizes', 'Switches', 'Forces', 'Slight', 'Times', 'Flags', 'Looks')}


def untrained(task, loss='ppo', network='mlp', seed=0, **fields):
  """Returns an agent with untrained parameters."""
  experiment = resolve(schema.on_one_device(changed(small(loss, task, network), **fields)))
  run = build.make_run(experiment)
  player = evaluation.make_player(run, run.initial_state().params, 7, 700)
  return agent_lib.Agent(experiment, player, seed)


def same(a, b):
  """Tells whether two pytrees of arrays are equal."""
  return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def forward(params, obs):
  """Computes the logits of an MLP of tanh layers with NumPy, for observations [B, D]."""
  torso = params['params']['torso']
  x = obs
  for name in sorted(torso):
    x = np.tanh(x @ np.asarray(torso[name]['kernel']) + np.asarray(torso[name]['bias']))
  head = params['params']['policy']
  return x @ np.asarray(head['kernel']) + np.asarray(head['bias'])


def test_actions_follow_the_networks_logits():
  agent = untrained('CartPole-v1', seed=3)
  rng = np.random.default_rng(0)
  obs = rng.normal(size=(64, 4)).astype(np.float32) * 10
  params = agent.player.params
  # The initial policy head is nearly 0, so that rounding would decide the action.
  params['params']['policy']['kernel'] = rng.normal(size=(64, 2)).astype(np.float32)
  logits = forward(jax.device_get(params), obs)
  greedy, state = agent.act(obs, greedy=True)
  assert state is None and greedy.shape == (64,)
  assert np.array_equal(greedy, logits.argmax(-1)) and len(set(greedy)) == 2
  # A single observation has no batch axis.
  single_actions = [agent.act(x, greedy=True)[0] for x in obs]
  assert np.array_equal(single_actions, greedy) and np.ndim(single_actions[0]) == 0

  # Sampled actions follow the probabilities, differ between calls, and depend on the seed.
  first = obs[np.abs(logits[:, 0] - logits[:, 1]).argmin()]
  gap = np.diff(forward(jax.device_get(params), first[None])[0])[0]
  draws, _ = agent.act(np.tile(first, (4000, 1)))
  assert abs(draws.mean() - 1 / (1 + np.exp(-gap))) < 0.04
  assert not np.array_equal(draws, agent.act(np.tile(first, (4000, 1)))[0])
  a, b, c = (agent_lib.Agent(agent.experiment, agent.player, seed) for seed in (1, 1, 2))
  drawn = [[each.act(obs)[0].tolist() for _ in range(3)] for each in (a, b, c)]
  assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize('core', ['gru', 'lstm'])
def test_a_recurrent_state_is_carried_and_reset(core):
  agent = untrained('CartPole-v1', network__core=core, network__core_size=8)
  obs = np.random.default_rng(1).normal(size=(5, 3, 4)).astype(np.float32)
  player = agent.player
  algorithm = player.algorithm
  _, _, unrolled = algorithm.network.apply(player.params, obs, algorithm.initial_carry(3),
                                           np.ones((5, 3), bool))
  state = None
  for row in obs:
    _, state = agent.act(row, state)
  close = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), state, unrolled)
  assert jax.tree.all(close) and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))

  _, fresh = agent.act(obs[0])
  _, after = agent.act(obs[0], state, is_first=[False, True, False])
  for new, kept, began in zip(*map(jax.tree.leaves, (after, state, fresh)), strict=True):
    assert np.allclose(new[1], began[1], atol=1e-6)
    assert not np.allclose(new[0], began[0], atol=1e-3)
    assert kept.shape == new.shape == (3, 8)

  _, single_state = agent.act(obs[0][0])
  assert all(x.shape == (1, 8) for x in jax.tree.leaves(single_state))
  with pytest.raises(ValueError, match='state: must be what the last call for 3 observations'):
    agent.act(obs[0], single_state)
  with pytest.raises(ValueError, match=r'is_first: must have the shape \(3,\), got \(2,\)'):
    agent.act(obs[0], state, is_first=[True, False])


@pytest.mark.parametrize('task', essential(
    ['gymnasium:CartPole-v1', 'gymnasium:Pendulum-v1', 'gymnasium:Blackjack-v1',
     *OWN_ENVS.values()], 'gymnasium:CartPole-v1', 'gymnasium:Pendulum-v1',
    'gymnasium:Blackjack-v1', OWN_ENVS['Sizes']))
def test_an_agent_acts_in_gymnasium(task):
  """The environment accepts the actions, and the network gets the same input as in training."""
  agent = untrained(task, policy='auto')
  name = task.partition(':')[2]
  env = globals()[name]() if name in OWN_ENVS else gymnasium.make(name)
  obs, _ = env.reset(seed=5)
  vector_env = family_of(task).make_vector_env(task, {}, [5, 6], 1, 0)
  try:
    assert np.array_equal(agent._batch(obs)[0][0], vector_env.first_obs[0])  # noqa: SLF001
  finally:
    vector_env.close()
  state = None
  for _ in range(5):
    action, state = agent.act(obs, state)
    assert env.action_space.contains(action), action
    assert type(action) is type(env.action_space.sample())
    assert action.dtype == env.action_space.dtype
    obs, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
      obs, _ = env.reset()

  # A batch of Gymnasium's vector environments.
  gymnasium_envs = gymnasium.vector.SyncVectorEnv([lambda: type(env.unwrapped)()] * 3)
  obs, _ = gymnasium_envs.reset(seed=1)
  actions, _ = agent.act(obs)
  assert gymnasium_envs.action_space.contains(actions), actions
  gymnasium_envs.step(actions)


@pytest.mark.parametrize('task, network', [
    ('CartPole-v1', 'mlp'), ('Pendulum-v1', 'mlp'), ('CartpoleSwingup-v1', 'mlp'),
    ('Pong-v5', 'nature_cnn')])
def test_an_agent_acts_in_envpool(task, network):
  agent = untrained(task, network=network)
  options = dict(agent.experiment.env_options)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    pool = envpool.make(task, env_type='gymnasium', num_envs=3, seed=1, **options)
  obs, _ = pool.reset()
  state = None
  for _ in range(3):
    actions, state = agent.act(obs, state)
    assert actions.shape == (3, *pool.action_space.shape)
    assert actions.dtype == pool.action_space.dtype
    obs, *_ = pool.step(actions)
  first = jax.tree.map(lambda x: x[0], obs)
  assert np.array_equal(agent._batch(first)[0][0], agent._batch(obs)[0][0])  # noqa: SLF001
  action, _ = agent.act(first, greedy=True)
  assert np.allclose(action, agent.act(obs, greedy=True)[0][0], atol=1e-6)
  pool.close()


@pytest.mark.parametrize('loss, task, network', [
    ('dqn', 'CartPole-v1', 'mlp'), ('dpg', 'Pendulum-v1', 'deterministic'),
    ('td3', 'Pendulum-v1', 'mlp')])
def test_agents_of_a_replay_act_without_exploring(loss, task, network):
  agent = untrained(task, loss, network, num_minibatches=1)
  obs = np.random.default_rng(0).normal(size=(64, *agent.experiment.spec.obs_shape))
  assert np.array_equal(agent.act(obs)[0], agent.act(obs, greedy=True)[0])


@pytest.mark.parametrize('obs, message', [
    (np.zeros(5, np.float32), r'float32 of shape \(4,\), or a batch of these; got float32 of shape '
                              r'\(5,\)'),
    (np.zeros((2, 2, 4), np.float32), r'got float32 of shape \(2, 2, 4\)'),
    ('x', 'got <U1'), (None, 'got object'), (np.zeros(4, complex), 'got complex128')])
def test_a_wrong_observation_is_refused(obs, message):
  with pytest.raises(ValueError, match=f'^obs: .*{message}'):
    untrained('CartPole-v1').act(obs)


@pytest.mark.parametrize('name, right, wrong', [
    ('Slight', [1, 0], [0, 2]), ('Flags', [1, 0], [0, 2]), ('Times', [2**40, 0], ['a', 'b'])])
def test_whole_numbers_are_observed_in_any_dtype_that_holds_them(name, right, wrong):
  agent = untrained(OWN_ENVS[name])
  shape = agent.experiment.spec.obs_shape
  dtypes = (np.int64, np.uint64) if max(right) > 1 else (bool, np.int8, np.uint8, np.int64)
  # The usual form of the task, for which the network is compiled.
  expected = agent._batch(np.resize(right, shape).astype(dtypes[0]))[0]  # noqa: SLF001
  assert expected.dtype == agent.experiment.spec.obs_dtype
  for dtype in dtypes:
    obs = np.resize(right, shape).astype(dtype)
    assert np.array_equal(agent._batch(obs)[0], expected)  # noqa: SLF001
    assert np.array_equal(agent._batch(np.stack([obs, obs]))[0][1:], expected)  # noqa: SLF001
  agent.act(np.resize(right, shape))
  with pytest.raises(ValueError, match='^obs: must be .*; got .*'):
    agent.act(np.resize(wrong, shape))


@pytest.mark.parametrize('obs', [{'a': np.zeros(2)}, np.zeros(3), {'a': [0, 0], 'b': {'x': 3}}])
def test_a_wrong_dict_of_observations_is_refused(obs):
  with pytest.raises(ValueError, match='^obs: '):
    untrained(OWN_ENVS['Forces']).act(obs)


@pytest.mark.parametrize('loss, fields', essential([
    ('ppo', dict(env__choices=(3, 4), env__form='tuple')), ('impala', {}),
    ('dqn', dict(num_minibatches=1)), ('pqn', {}), ('r2d2', dict(
        num_minibatches=1, network__core='gru', network__core_size=8))], 'ppo', 'dqn'))
def test_an_observation_that_allows_no_action_is_refused(loss, fields):
  """One element of an action without a choice is enough."""
  agent = untrained('tests.envs.masked:PythonDoors', loss, **fields)
  space = agent._spaces.observation  # noqa: SLF001
  obs = space.sample()
  obs['action_mask'] = jax.tree.map(np.ones_like, obs['action_mask'])
  stuck = copy.deepcopy(obs)
  jax.tree.leaves(stuck['action_mask'])[-1][:] = 0
  agent.act(obs)
  with pytest.raises(ValueError, match='^obs: its mask action_mask allows no action$'):
    agent.act(stuck)
  batch = jax.tree.map(lambda *x: np.stack(x), obs, stuck, obs)
  with pytest.raises(ValueError, match=r'^obs \[1\]: its mask action_mask allows no action$'):
    agent.act(batch)


def test_an_image_alone_in_a_dict_is_an_image():
  agent = untrained(OWN_ENVS['Looks'], network='nature_cnn', network__kernels=(3,),
                    network__strides=(2,), network__channels=(4,), network__hidden=8)
  assert agent.experiment.spec.obs_shape == (3, 8, 8)
  batch = agent._spaces.observation.sample()['pixels'][None].repeat(2, 0)  # noqa: SLF001
  assert np.array_equal(agent._batch({'pixels': batch})[0], batch)  # noqa: SLF001
  with pytest.raises(ValueError, match='^obs: '):
    agent.act(batch)


def without_layout(folder):
  """Makes config.json one of podracer_jit 0.6, which did not record the layout."""
  path = folder / 'config.json'
  record = json.loads(path.read_text())
  assert record.pop('layout') == spaces.LAYOUT
  record['versions']['podracer_jit'] = '0.6.0'
  path.write_text(json.dumps(record))


@pytest.mark.parametrize('name, has_changed', [
    ('Counts', True), ('Looks', True), ('Sizes', False), ('Forces', False)])
def test_a_run_whose_observations_have_another_layout_is_refused(name, has_changed, tmp_path):
  """Whatever reads the workdir, the message is one line that says why."""
  task = f'{__name__}:{name}'
  run = fresh(small('ppo', task))
  fields = run.experiment.fields
  open_workdir(tmp_path, fields)
  agent = tmp_path / 'agent'
  untrained(task).save(agent)
  module = [__name__]

  def open_run():
    (tmp_path / 'receipts.jsonl').touch()
    with opening.opened_run(run, tmp_path, Request()):
      pass

  reads = {
      'evaluate, load, export': lambda: evaluation.read_experiment(tmp_path, module),
      'rerun': lambda: rerun.one_device_experiment(tmp_path, module, 1),
      'resume': open_run,
      'load a saved agent': lambda: agent_lib.load_saved(agent, allow_modules=module)}
  for read in reads.values():
    read()
  without_layout(agent)
  (agent / 'manifest.json').unlink()
  checkpoints.write_manifest(agent, '')
  for each, read in reads.items():
    (tmp_path / 'config.json').unlink()
    open_workdir(tmp_path, fields)
    without_layout(tmp_path)
    if not has_changed:
      read()
      continue
    with pytest.raises(ValueError, match=(
        'its network was trained with podracer_jit 0.6.0, and the observations of .* have another '
        'layout since: .* now; train anew, or go on with podracer_jit 0.6.0$')) as error:
      read()
    assert '\n' not in str(error.value), each


def test_an_agent_is_saved_and_loaded(tmp_path):
  agent = untrained('CartPole-v1', network__core='gru', network__core_size=8, normalise__obs=True)
  agent.save(tmp_path / 'folder' / 'agent')
  assert {path.name for path in (tmp_path / 'folder' / 'agent').iterdir()} == {
      'config.json', 'parameters.safetensors', 'manifest.json'}
  loaded = agent_lib.load_saved(tmp_path / 'folder' / 'agent')
  assert (loaded.task, loaded.update, loaded.steps) == ('CartPole-v1', 7, 700)
  assert 'CartPole-v1 after update 7 (700 steps)' in repr(loaded)
  assert same(agent.player.params, loaded.player.params)
  obs = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
  assert same(agent.act(obs), loaded.act(obs))


def test_saving_touches_no_other_folder_and_refuses_the_current_one(tmp_path, monkeypatch):
  mine = tmp_path / 'agent.saving' / 'mine'
  mine.parent.mkdir()
  mine.write_text('keep')
  agent = untrained('CartPole-v1')
  agent.save(tmp_path / 'agent')
  assert mine.read_text() == 'keep'
  assert sorted(path.name for path in tmp_path.iterdir()) == ['agent', 'agent.saving']
  (tmp_path / 'empty').mkdir()
  monkeypatch.chdir(tmp_path / 'empty')
  with pytest.raises(ValueError, match='^. is the current folder, which cannot be replaced'):
    agent.save('.')


def test_a_damaged_saved_agent_is_refused(tmp_path):
  good = tmp_path / 'good'
  agent = untrained('CartPole-v1')
  agent.save(good)
  with pytest.raises(ValueError, match='exists; choose another name'):
    agent.save(good)
  for name in ('config.json', 'parameters.safetensors'):
    bad = tmp_path / name
    shutil.copytree(good, bad)
    content = bytearray((bad / name).read_bytes())
    content[-3] ^= 1
    (bad / name).write_bytes(content)
    with pytest.raises(ValueError, match=f'is not as it was saved: {name} is not what was saved'):
      agent_lib.load_saved(bad)
    (bad / name).unlink()
    with pytest.raises(ValueError, match=f'{name} cannot be read'):
      agent_lib.load_saved(bad)

  # Undamaged files of a network of another size.
  record = json.loads((good / 'config.json').read_text())
  record['config']['network']['hidden'] = [8]
  (good / 'config.json').write_text(json.dumps(record))
  (good / 'manifest.json').unlink()
  checkpoints.write_manifest(good, '')
  with pytest.raises(ValueError, match='the network has .* and parameters.safetensors has'):
    agent_lib.load_saved(good)


def test_a_saved_agent_imports_only_allowed_modules(tmp_path):
  untrained(OWN_ENVS['Sizes']).save(tmp_path / 'agent')
  with pytest.raises(ValueError, match='names modules of its own'):
    agent_lib.load_saved(tmp_path / 'agent')
  assert agent_lib.load_saved(tmp_path / 'agent', allow_modules=[__name__]).update == 7
