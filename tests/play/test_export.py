"""Exported agents: they act as the agent does, without the package, on any batch and platform."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from podracer_jit.agents import action_masks
from podracer_jit.cli import export as command
from podracer_jit.envs import spaces
from podracer_jit.experiment import build
from podracer_jit.numerics import convolution
from podracer_jit.play import agent as agent_lib
from podracer_jit.play import export
from podracer_jit.runtime import host
from podracer_jit.training import evaluator
from podracer_jit.workdir import checkpoints
from tests.envs.masked import LIMIT
from tests.play.test_agent import OWN_ENVS, untrained
from tests.runs import QUICK, open_workdir, prepared, small
from tests.tiers import essential

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / 'examples' / 'load_exported.py'


def trained(task, **fields):
  """Returns an agent whose parameters and statistics all differ from their initial values."""
  agent = untrained(task, **fields)
  rng = np.random.default_rng(3)

  def moved(x):
    return np.abs(x + rng.normal(scale=0.2, size=x.shape)).astype(np.float32)
  params = dict(jax.device_get(agent.player.params))
  trained_part = 'actor' if 'actor' in params else 'params'
  params[trained_part] = jax.tree.map(
      lambda x: (x + rng.normal(scale=0.2, size=x.shape)).astype(np.float32), params[trained_part])
  if 'moments' in params:
    params['moments'] = jax.tree.map(moved, params['moments'])
  return agent_lib.Agent(agent.experiment, agent.player._replace(params=params), seed=5)


class Loaded:
  """An exported agent, loaded from its files without the package."""

  def __init__(self, folder):
    self.about = json.loads((folder / 'agent.json').read_text())
    self.params = safetensors_numpy.load_file(folder / 'parameters.safetensors')
    self.exported = {
        name: jax.export.deserialize(bytearray((folder / each['file']).read_bytes()))
        for name, each in self.about['programs'].items()}

  def act(self, name, obs, state, is_first, *key):
    if state is None:
      state = [np.zeros((len(is_first), *x['shape']), x['dtype']) for x in self.about['state']]
    return jax.device_get(self.exported[name].call(self.params, obs, state, is_first, *key))


def observations(agent, size, rng):
  """Returns random observations in the structure of the task; images are bytes."""
  spec = agent.experiment.spec
  task_spaces = agent._spaces  # noqa: SLF001
  if type(task_spaces.observation).__name__ in ('Dict', 'Tuple', 'Discrete'):
    task_spaces.observation.seed(int(rng.integers(1000)))
    samples = [task_spaces.observation.sample() for _ in range(size)]
    obs = jax.tree.map(lambda *x: np.stack(x), *samples)
    if spec.action_mask:  # one that allows something
      mask = spec.action_mask.name
      obs[mask] = jax.tree.map(lambda x: x | (np.arange(x.shape[-1]) == 1), obs[mask])
    return obs
  if spec.obs_dtype == np.uint8:
    return rng.integers(0, 256, (size, *spec.obs_shape), np.uint8)
  return rng.normal(size=(size, *spec.obs_shape)).astype(spec.obs_dtype)


CASES = {
    'categorical': ('CartPole-v1', dict(normalise__obs=True, normalise__value=True)),
    'product': (OWN_ENVS['Switches'], {}),
    'gaussian': ('Pendulum-v1', {}),
    'scaled_gaussian': ('Pendulum-v1', dict(policy='scaled_gaussian')),
    'tanh_gaussian': (OWN_ENVS['Forces'], dict(policy='tanh_gaussian')),
    'impala': ('CartPole-v1', dict(loss='impala')),
    'dqn': ('CartPole-v1', dict(loss='dqn', num_minibatches=1)),
    'pqn': ('CartPole-v1', dict(loss='pqn', network__core='gru', network__core_size=8)),
    'r2d2': ('CartPole-v1', dict(loss='r2d2', num_minibatches=1, network__core='lstm',
                                 network__core_size=8)),
    'sac': ('Pendulum-v1', dict(loss='sac', num_minibatches=1)),
    'td3': ('Pendulum-v1', dict(loss='td3', num_minibatches=1)),
    'vmpo': ('CartPole-v1', dict(loss='examples.vmpo:VMPO')),
    'ppg': ('CartPole-v1', dict(loss='examples.ppg:PPG', network__separate_critic=True)),
    'rnd': ('CartPole-v1', dict(loss='examples.rnd:RND', loss__embedding=5)),
    'dpg': ('Pendulum-v1', dict(loss='dpg', network='deterministic', num_minibatches=1)),
    'nature_cnn': ('Pong-v5', dict(network='nature_cnn')),
    'resnet': ('Pong-v5', dict(network='impala_resnet', network__blocks=1)),
    'image_in_a_dict': (OWN_ENVS['Looks'], dict(
        network='nature_cnn', network__kernels=(3,), network__strides=(2,),
        network__channels=(4,), network__hidden=8)),
    'gru': (OWN_ENVS['Sizes'], dict(network__core='gru', network__core_size=8)),
    'lstm': ('CartPole-v1', dict(network__core='lstm', network__core_size=8)),
    'simba': ('Pendulum-v1', dict(network='simba', network__hidden=8, network__blocks=2)),
    'mask': ('tests.envs.masked:PythonDoors', {}),
    'mask_of_a_product': ('tests.envs.masked:PythonDoors', dict(
        env__choices=(3, 4), env__form='tuple', normalise__obs=True)),
    'mask_of_values': ('tests.envs.masked:Doors', dict(loss='dqn', num_minibatches=1)),
    'mask_of_pqn': ('tests.envs.masked:Doors', dict(
        loss='pqn', network__core='gru', network__core_size=8)),
    'mask_of_r2d2': ('tests.envs.masked:PythonDoors', dict(
        loss='r2d2', num_minibatches=1, network__core='lstm', network__core_size=8)),
    'mask_of_vmpo': ('tests.envs.masked:Doors', dict(loss='examples.vmpo:VMPO')),
    'mask_of_ppg': ('tests.envs.masked:Doors', dict(
        loss='examples.ppg:PPG', network__separate_critic=True)),
    'mask_of_rnd': ('tests.envs.masked:Doors', dict(
        loss='examples.rnd:RND', loss__embedding=5)),
    'image_and_vector': ('MiniGrid-DoorKey-5x5-v0', dict(network='image_and_vector')),
}


def close(actual, expected, scale=1.0):
  """Tells whether arrays are within the tolerance that an export states."""
  return np.all(np.abs(actual - expected) <= scale * (
      export.TOLERANCE['absolute'] + export.TOLERANCE['relative'] * np.abs(expected)))


def acted_by_row(player, key, *inputs):
  """Returns actions and distributions of rows that are acted on one by one, with a key for each."""
  def row(i):
    return player.act(player.params, *jax.tree.map(lambda x: x[i:i + 1], inputs),
                      jax.random.fold_in(key, i))

  rows = [row(i) for i in range(len(inputs[0]))]
  action, distribution = (np.concatenate([getattr(x, name) for x in rows])
                          for name in ('action', 'distribution'))
  return np.asarray(player.policy.to_env(action)), distribution


def check_mask(about, mask, *actions):
  """Checks that an export says that it obeys masks, and does."""
  assert about['policy']['mask'].startswith('action_mask of an observation says which choices are')
  assert about['network']['reads']['shape'] == [sum(x.shape[-1] for x in jax.tree.leaves(mask))]
  for action in actions:
    for i, legal in enumerate(jax.tree.leaves(mask)):
      assert legal[np.arange(len(legal)), action.reshape(len(legal), -1)[:, i]].all()


@pytest.mark.parametrize('name', essential(CASES, 'categorical', 'gru', 'image_in_a_dict', 'sac',
                                           'mask_of_a_product'))
def test_an_exported_agent_acts_as_the_agent_does(name, tmp_path):
  task, fields = CASES[name]
  agent = trained(task, **fields)
  agent.export(tmp_path / 'out')
  # A task of a user's module has a copy of the module, too.
  assert {path.name for path in (tmp_path / 'out').iterdir()} - {'sources'} == {
      'agent.json', 'config.json', 'drawn.jax', 'greedy.jax', 'manifest.json',
      'parameters.safetensors'}
  loaded = Loaded(tmp_path / 'out')
  assert loaded.about['checked']['largest_difference'] <= 1e-3

  rng = np.random.default_rng(1)
  player = agent.player
  calls = 0
  for size in (1, 3, 16) if name == 'lstm' else (3,):
    agent_state = exported_state = None
    for is_first in (np.ones(size, bool), np.arange(size) % 2 == 1):
      obs = observations(agent, size, rng)
      greedy = [agent.act(obs, agent_state, greedy=True, is_first=is_first)[0],
                loaded.act('greedy', obs, exported_state, is_first)[0]]
      key = jax.random.fold_in(jax.random.key(5), calls + 1)
      _, next_agent_state = agent.act(obs, agent_state, is_first=is_first)
      calls += 2
      action, next_exported_state, numbers = loaded.act('drawn', obs, exported_state, is_first,
                                                 np.asarray(jax.random.key_data(key)))
      batch = agent._batch(obs)[0]  # noqa: SLF001
      before = agent_state if agent_state is not None else player.algorithm.initial_carry(size)
      before = jax.tree.map(lambda x, first=is_first: np.where(first[:, None], 0, x), before)
      drawn, distribution = acted_by_row(player, key, batch, before, is_first)
      if agent._spaces:  # noqa: SLF001
        drawn = spaces.task_actions(drawn, agent._spaces.action)  # noqa: SLF001
      assert close(numbers, distribution)
      assert np.std(numbers[numbers > action_masks.lowest(np.float32)]) > 1e-3
      if name.startswith('mask'):
        check_mask(loaded.about, obs['action_mask'], greedy[1], action)
      for own, exported in (greedy, (drawn, action)):
        assert exported.shape == own.shape
        same = np.array_equal if np.issubdtype(own.dtype, np.integer) else close
        assert same(exported, own.astype(exported.dtype))
      if player.policy.log_prob:  # a policy that samples
        assert not np.array_equal(greedy[1], action) or size == 1 or np.size(action) < 30
      for x, y in zip(next_exported_state, jax.tree.leaves(next_agent_state), strict=True):
        assert close(x, y)
      agent_state = next_agent_state
      exported_state = next_exported_state


@pytest.mark.parametrize('name, convolutions', [('nature_cnn', 2), ('resnet', 3)])
def test_exported_programs_are_for_three_platforms_and_have_plain_convolutions(name, convolutions,
                                                                          tmp_path):
  task, fields = CASES[name]
  agent = untrained(task, **fields)
  files = export.files(agent.player, agent.experiment, agent._spaces)  # noqa: SLF001
  for name in export.PROGRAMS.values():
    program = jax.export.deserialize(bytearray(files[name]))
    assert program.platforms == ('cpu', 'cuda', 'tpu')
    text = program.mlir_module()
    # JAX writes an operation once for each platform. The forms for CPUs would have more operations.
    assert text.count('stablehlo.convolution(') == 3 * convolutions
    assert text.count('precision HIGHEST>') > 3 * convolutions
  about = json.loads(files['agent.json'])
  assert {each['file'] for each in about['programs'].values()} < files.keys()
  assert about['network']['reads']['shape'] == list(agent.experiment.spec.obs_shape)


def test_plain_convolutions_and_pools_equal_those_of_cpus():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(5, 12, 10, 3)).astype(np.float32)
  w = rng.normal(size=(3, 3, 3, 8)).astype(np.float32)

  def plain_and_fast(function):
    with convolution.plainly():
      plain = jax.jit(lambda: function())
      text = plain.lower().as_text()
      return text, plain(), jax.jit(lambda: function())()
  for stride, padding in ((1, 'SAME'), (2, 'VALID'), (3, 'VALID')):
    text, plain, fast = plain_and_fast(lambda s=stride, p=padding: convolution.conv2d(x, w, s, p))
    assert text.count('stablehlo.convolution') == 1
    assert np.allclose(plain, fast, atol=1e-4)
  plain = plain_and_fast(lambda: convolution.max_pool(jnp.asarray(x), 3, 2))[1]
  assert np.array_equal(plain, convolution.max_pool(jnp.asarray(x), 3, 2))


WITHOUT = '''
import importlib, runpy, sys
sys.modules['podracer_jit'] = None  # an import of it fails
try:
  importlib.import_module('podracer_jit')
except ImportError:
  sys.argv = sys.argv[1:]
  runpy.run_path(sys.argv[0], run_name='__main__')
  sys.exit(any(name.startswith('podracer_jit.') for name in sys.modules))
'''


def play(folder, cwd, *flags):
  return subprocess.run([sys.executable, '-W', 'ignore', '-c', WITHOUT, EXAMPLE, folder, *flags],
                        capture_output=True, text=True, timeout=300, env=QUICK, cwd=cwd,
                        check=False)


@pytest.mark.parametrize('task, fields', [
    ('CartPole-v1', dict(network__core='gru', network__core_size=8)),
    ('gymnasium:Blackjack-v1', {})])
def test_the_example_plays_without_the_package(task, fields, tmp_path):
  untrained(task, **fields).export(tmp_path / 'out')
  done = play(tmp_path / 'out', tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f'{task} after update 7: return ')


@pytest.mark.parametrize('loss, fields', essential([
    ('ppo', {}), ('dqn', dict(num_minibatches=1)), ('pqn', {})], 'ppo'))
def test_the_example_obeys_action_masks(loss, fields, tmp_path):
  """An illegal action would end the episode, with a return of -100."""
  task = 'gymnasium:tests.envs.masked:PythonDoors-v0'
  untrained(task, loss=loss, **fields).export(tmp_path / 'out')
  done = play(tmp_path / 'out', EXAMPLE.parents[1], '--allow_modules=tests.envs.masked')
  assert done.returncode == 0, done.stderr
  score, = re.fullmatch(rf'{task} after update 7: return (\d+) in {LIMIT} steps\n',
                        done.stdout).groups()
  assert 0 <= int(score) <= LIMIT


def of_a_stranger(folder, how):
  """Damages an export as a stranger could."""
  path = folder / 'manifest.json'
  record = json.loads(path.read_text())
  files = record['files']
  file = folder / 'drawn.jax'
  if how in ('pipe', 'link', 'device', 'unnamed_pipe'):
    file.rename(folder.parent / 'elsewhere')
    if how == 'unnamed_pipe':
      del files[file.name]
    if how.endswith('pipe'):
      os.mkfifo(file)
    else:
      file.symlink_to('/dev/zero' if how == 'device' else folder.parent / 'elsewhere')
  elif how == 'piped_manifest':
    path.unlink()
    os.mkfifo(path)
    return
  else:
    files[how] = files['drawn.jax']
  path.write_text(json.dumps(record))


@pytest.mark.parametrize('how', essential([
    'pipe', 'link', 'device', 'unnamed_pipe', 'piped_manifest', '/dev/zero', '../elsewhere',
    '\x1b[31m\nred', 'a\x00b'], 'pipe', 'link', '../elsewhere', '\x1b[31m\nred'))
def test_an_export_of_a_stranger_is_read_only_inside_of_its_folder(how, tmp_path):
  untrained('CartPole-v1').export(tmp_path / 'out')
  shutil.copy(tmp_path / 'out' / 'drawn.jax', tmp_path / 'elsewhere')
  of_a_stranger(tmp_path / 'out', how)
  with pytest.raises(ValueError, match='is not as it was saved: .*(cannot be read|missing)') as e:
    agent_lib.load_saved(tmp_path / 'out')
  assert str(e.value).isprintable()
  done = play(tmp_path / 'out', tmp_path)
  assert done.returncode == 1, done.stdout
  assert done.stderr.count('\n') == 1 and done.stderr[:-1].isprintable()
  assert 'is not ' in done.stderr


@pytest.mark.parametrize('task', ['gymnasium:evil:Cart-v0', 'evil:Cart-v0'])
def test_the_example_imports_no_module_that_an_export_names(task, tmp_path):
  folder = tmp_path / 'out'
  untrained('gymnasium:CartPole-v1').export(folder)
  about = json.loads((folder / 'agent.json').read_text()) | {'task': task}
  (folder / 'agent.json').write_text(json.dumps(about))
  digest = checkpoints.read_manifest(folder)['state_sha256']
  (folder / checkpoints.MANIFEST).unlink()
  checkpoints.write_manifest(folder, digest)
  (tmp_path / 'evil.py').write_text(
      "import gymnasium\nopen('ran', 'w')\n"
      "gymnasium.register('Cart-v0', 'gymnasium.envs.classic_control:CartPoleEnv', None, 500)\n")
  done = play(folder, tmp_path)
  assert done.returncode == 1 and done.stderr.count('\n') == 1
  assert 'if you trust it: --allow_modules=evil' in done.stderr
  assert not (tmp_path / 'ran').exists()
  done = play(folder, tmp_path, '--allow_modules=evil')
  assert done.returncode == 0 and (tmp_path / 'ran').exists(), done.stderr


def test_a_damaged_export_is_refused(tmp_path):
  untrained('CartPole-v1').export(tmp_path / 'good')
  names = [path.name for path in (tmp_path / 'good').iterdir() if path.name != 'manifest.json']
  for name in names:
    bad = tmp_path / name
    shutil.copytree(tmp_path / 'good', bad)
    content = bytearray((bad / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bad / name).write_bytes(content)
    with pytest.raises(ValueError, match=f'is not as it was saved: {name} is not what was saved'):
      agent_lib.load_saved(bad)
  done = play(tmp_path / 'drawn.jax', tmp_path)
  assert done.returncode == 1 and done.stderr.count('\n') == 1
  assert 'drawn.jax is not what was exported' in done.stderr
  # The export is also a saved agent, and cannot be overwritten.
  agent = agent_lib.load_saved(tmp_path / 'good')
  with pytest.raises(ValueError, match='exists; choose another name'):
    agent.export(tmp_path / 'good')


def test_a_network_that_computes_something_else_when_exported_is_refused(monkeypatch):
  agent = untrained('CartPole-v1')

  class Forgetful(type(agent.player.algorithm)):
    def act(self, params, obs, *rest):
      acted = super().act(params, obs, *rest)
      # The agent's batch size, which is 1 in the program.
      return acted._replace(distribution=acted.distribution + len(obs))

  algorithm = agent.player.algorithm
  player = agent.player._replace(algorithm=Forgetful().bind(algorithm.parts))
  with pytest.raises(ValueError, match='computes something else than the agent') as error:
    export.files(player, agent.experiment, agent._spaces)  # noqa: SLF001
  assert '\n' not in str(error.value)

  class Fails(type(algorithm)):
    def act(self, *args):
      raise KeyError('mine')
  player = agent.player._replace(algorithm=Fails().bind(algorithm.parts))
  with pytest.raises(ValueError, match="export: the network mlp cannot be exported: KeyError"):
    export.files(player, agent.experiment, agent._spaces)  # noqa: SLF001


@pytest.mark.quick
def test_the_verb_exports_a_checkpoint(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)
  workdir = tmp_path / 'run'
  run = prepared(small())
  open_workdir(workdir, run.experiment.fields)
  with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
    for update in (1, 2):
      saved.save(build.Snapshot(run.initial_state()._replace(update=jnp.int32(update))), {})
  (workdir / evaluator.NAME).write_text(json.dumps(dict(update=1, mean=3.0)) + '\n')

  def call(*args):
    return command.main(['podracer_jit export', f'--workdir={workdir}', *args])
  assert call(f'--out={tmp_path / "out"}') == 0
  output = capsys.readouterr().out
  assert f'{tmp_path / "out"}: the agent of CartPole-v1 after update 2 (0 steps), ' in output
  assert call(f'--out={tmp_path / "best"}', '--update=best') == 0
  assert json.loads((tmp_path / 'best' / 'agent.json').read_text())['update'] == 1
  capsys.readouterr()
  for args, message in [
      ([f'--out={tmp_path / "out"}'], f'--out: {tmp_path / "out"} exists; choose another name'),
      ([f'--out={tmp_path / "x"}', '--update=7'], 'has no checkpoint of update 7'),
      ([f'--out={tmp_path / "x"}', '--update=first'], '--update: must be a number or best'),
      ([f'--out={tmp_path / "x"}', 'pong'], 'pong: not a flag')]:
    assert call(*args) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1
  assert not (tmp_path / 'x').exists()
  (tmp_path / 'file').touch()
  assert call(f'--out={tmp_path / "file" / "x"}') == 1
  assert 'cannot write' in capsys.readouterr().err
