"""Real rollouts of one task of every EnvPool family that can be installed."""

import subprocess

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from podracer_jit.actor import rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents import networks
from podracer_jit.cli import envs as envs_command
from podracer_jit.envs import envpool_envs
from podracer_jit.envs import spaces as env_spaces
from podracer_jit.envs.protocol import ObsPart, take_apart
from podracer_jit.experiment.resolve import resolve
from podracer_jit.losses.algorithm import ForActors
from podracer_jit.workdir import workdir as workdir_lib
from tests.envs.test_envs import run_in_new_process
from tests.runs import changed, run, small
from tests.tiers import essential
from tests.workers import wrap

NUM_ENVS = 2
STEPS = 5
SEEDS = [3, 9]

# Family, task, options and network.
TASKS = [
    ('atari', 'Pong-v5', dict(img_height=42, img_width=42), 'nature_cnn'),
    ('box2d', 'CarRacing-v2', {}, 'nature_cnn'),
    ('classic_control', 'Acrobot-v1', {}, 'mlp'),
    ('gfootball', 'gfootball/academy_empty_goal_close-v1', {}, 'nature_cnn'),
    ('highway', 'Highway-v0', {}, 'mlp'),
    ('jumanji', 'Cleaner-v0', {}, 'mlp'),
    ('minigrid', 'MiniGrid-Empty-5x5-v0', {}, 'image_and_vector'),
    ('mujoco.dmc', 'CartpoleBalance-v1', {}, 'mlp'),
    ('mujoco.gym', 'InvertedPendulum-v4', {}, 'mlp'),
    ('mujoco.metaworld', 'MetaWorld/Assembly-v3', {}, 'mlp'),
    ('mujoco.myosuite', 'MyoSuite/motorFingerPoseFixed-v0', {}, 'mlp'),
    ('mujoco.playground', 'Go1Footstand-v1', {}, 'mlp'),
    ('mujoco.robotics', 'FrankaKitchen-v1', {}, 'mlp'),
    ('pgx', 'Play2048-v1', {}, 'mlp'),
    ('toy_text', 'Taxi-v3', {}, 'mlp'),
    ('vizdoom', 'D1Basic-v1', dict(use_combined_action=True), 'nature_cnn'),
]

SIZES = {
    'mlp': {'hidden': (8,)},
    'nature_cnn': {'channels': (4,), 'kernels': (8,), 'strides': (8,), 'hidden': 8},
    'image_and_vector': {'channels': (4,), 'image_hidden': 8, 'vector_hidden': (8,)}}


# Their masks are of combinations of choices, which policies do not obey.
JOINTLY_MASKED = ('FlatPack-v0', 'Jumanji/Tetris-v0', 'Jumanji/Minesweeper-v0')


def config_of(task, network, options):
  config = small('ppo', task, network)
  config['env'] = {'task': task, 'num_envs': NUM_ENVS, **options}
  if task in JOINTLY_MASKED:
    config['env']['action_mask'] = ''
  config['network'] |= SIZES[network]
  return config


def roll(task, options=None, network='mlp', steps=STEPS):
  """Returns the spec of a task, and a rollout of it by an untrained network."""
  config = config_of(task, network, options or {})
  experiment = resolve(config | {'num_grad_shards': 1, 'num_shards': 1})
  spec = experiment.spec
  algorithm = experiment.algorithm
  vector_env = envpool_envs.make_vector_env(task, options or {}, SEEDS, 1)
  program = RolloutProgram([vector_env])
  try:
    given = ForActors(algorithm.init(jax.random.key(0)))
    state = rollouts.initial_state(algorithm, [vector_env], [jax.random.key(1)])
    function = rollouts.make_rollout(algorithm, [vector_env], steps)
    _, (rollout,) = program.load(function, (given, state), (1,))(given, state)
    return spec, jax.device_get(rollout)
  finally:
    program.close()


def steps_of_the_python_api(task, options, actions):
  """Yields (observation, reward) of EnvPool's own Python API for the same actions."""
  pool = envpool.make(task, env_type='gymnasium', num_envs=NUM_ENVS, batch_size=NUM_ENVS,
                      seed=SEEDS, num_threads=1, **options)
  yield pool.reset()[0], None
  for action in actions:
    obs, reward, *_ = pool.step(action)
    yield obs, reward
  pool.close()


def test_tasks_cover_every_family_that_can_be_installed():
  missing = set(envpool_envs.families()) - {family for family, *_ in TASKS}
  assert missing <= {'procgen'}  # procgen needs a system library


@pytest.mark.parametrize('family, task, options, network', essential(
    TASKS, 'atari', 'mujoco.gym', 'mujoco.dmc', 'vizdoom', 'minigrid'))
def test_a_task_of_each_family_is_rolled_out(family, task, options, network):
  assert task in envpool_envs.families()[family]
  spec, rollout = roll(task, options, network)
  obs = rollout.obs.frame if spec.stack > 1 else rollout.obs
  assert obs.dtype == spec.obs_dtype and np.isfinite(obs.astype(np.float64)).all()
  if spec.stack == 1:
    assert obs.shape == (STEPS + 1, NUM_ENVS, *spec.obs_shape)
  if spec.action_choices:
    assert rollout.action.shape == (STEPS, NUM_ENVS, len(spec.action_choices))
    assert (rollout.action >= 0).all() and (rollout.action < spec.action_choices).all()
  assert np.isfinite(rollout.reward).all() and np.isfinite(rollout.extras['log_prob']).all()
  assert (rollout.reward[~rollout.valid] == 0).all()


# Layout of images.


@pytest.mark.parametrize('task, options, shape, channels_last', [
    ('CarRacing-v2', {}, (96, 96, 3), True),
    ('CarRacing-v3', {}, (96, 96, 3), True),
    ('gfootball/11_vs_11_competition-v1', {}, (72, 96, 4), True),
    ('Play2048-v1', {}, (4, 4, 31), True),
    ('Racetrack-v0', {}, (2, 12, 12), False),
    ('Pong-v5', {}, (4, 84, 84), False),
    # Frames are always stacked along the first axis, whatever the size of the picture.
    ('Pong-v5', dict(img_width=3), (4, 84, 3), False),
    ('D1Basic-v1', dict(use_combined_action=True), (4, 84, 84), False),
])
def test_a_spec_tells_which_axis_of_an_image_has_the_channels(task, options, shape, channels_last):
  spec = envpool_envs.make_spec(task, options)
  assert spec.obs_shape == shape and spec.channels_last == channels_last


def test_every_football_task_has_its_channels_last():
  tasks = envpool_envs.families()['gfootball']
  assert len(tasks) == 18
  assert all(envpool_envs.make_spec(task, {}).channels_last for task in tasks)


@pytest.mark.parametrize('name', ['nature_cnn', 'impala_resnet', 'fixup_resnet'])
def test_a_torso_gives_the_same_output_for_either_layout(name):
  spec = envpool_envs.make_spec('CarRacing-v2', {})
  torso = networks.TORSOS[name](channels=(4,), hidden=5, **(
      dict(kernels=(8,), strides=(4,)) if name == 'nature_cnn' else {}))
  last = networks.fit_to_task(torso, spec)
  images = np.random.default_rng(0).integers(256, size=(3, 24, 32, 3)).astype(np.uint8)
  params = torso.init(jax.random.key(0), images.transpose(0, 3, 1, 2))
  assert params['params']['Conv_0']['kernel'].shape[2] == 3  # channels, not rows of pixels
  assert_array_equal(last.apply(params, images), torso.apply(params, images.transpose(0, 3, 1, 2)))


def test_a_torso_with_channels_first_is_not_changed():
  torso = networks.NatureCNN()
  assert networks.fit_to_task(torso, envpool_envs.make_spec('Pong-v5', {})) is torso


def test_only_bytes_are_divided_by_255():
  """Images of floats keep their values; only bytes are divided by 255."""
  torso = networks.NatureCNN(channels=(1,), kernels=(1,), strides=(1,), hidden=1)
  params = {'params': {
      'Conv_0': {'kernel': np.ones((1, 1, 1, 1), np.float32), 'bias': np.zeros(1, np.float32)},
      'Dense_0': {'kernel': np.ones((1, 1), np.float32), 'bias': np.zeros(1, np.float32)}}}
  assert torso.apply(params, np.full((1, 1, 1, 1), 0.5, np.float32)) == 0.5
  assert torso.apply(params, np.full((1, 1, 1, 1), 51, np.uint8)) == np.float32(51) / 255


# Observations.


def one_hot(values, size):
  return np.eye(size, dtype=np.uint8)[values]


@pytest.mark.parametrize('task, size', [('FrozenLake-v1', 16), ('Taxi-v3', 500), ('NChain-v0', 5)])
def test_a_number_is_observed_as_a_one_hot(task, size):
  spec, rollout = roll(task)
  assert spec.obs_shape == (size,) and spec.obs_dtype == np.uint8
  expected = [one_hot(obs, size) for obs, _ in steps_of_the_python_api(task, {}, rollout.action)]
  assert_array_equal(rollout.obs, expected)


def test_minigrid_is_a_vector_that_comes_apart_again():
  task = 'MiniGrid-Empty-5x5-v0'
  spec, rollout = roll(task, network='image_and_vector')
  assert spec.obs_dtype == np.uint8 and spec.obs_shape == (4 + 7 * 7 * 3 + 96,)
  assert spec.parts == (
      ObsPart('direction', (4,), np.dtype(bool), 0),
      ObsPart('image', (7, 7, 3), np.dtype(np.uint8), 4, True),
      ObsPart('mission', (96,), np.dtype(np.uint8), 151))
  parts = take_apart(rollout.obs, spec.parts)
  for t, (obs, reward) in enumerate(steps_of_the_python_api(task, {}, rollout.action)):
    assert_array_equal(parts['image'][t], obs['image'])
    assert_array_equal(parts['mission'][t], obs['mission'])
    assert_array_equal(parts['direction'][t], one_hot(obs['direction'], 4))
    if t and rollout.valid[t - 1].all():
      assert_array_equal(rollout.reward[t - 1], reward)


def test_nested_dicts_have_names_with_slashes():
  spec, rollout = roll('FrankaKitchen-v1')
  names = [part.name for part in spec.parts]
  assert names[0] == 'achieved_goal/bottom burner' and names[-1] == 'observation'
  assert names == sorted(names) and sum(part.size for part in spec.parts) == 93
  first = envpool.make('FrankaKitchen-v1', env_type='gymnasium', num_envs=NUM_ENVS, seed=SEEDS,
                       num_threads=1).reset()[0]
  parts = take_apart(rollout.obs[0], spec.parts)
  assert_array_equal(parts['desired_goal/kettle'], first['desired_goal']['kettle'].astype('f4'))
  assert_array_equal(parts['observation'], first['observation'].astype('f4'))


def test_take_apart_gives_shapes_and_dtypes():
  parts = (ObsPart('b', (2,), np.dtype(bool), 0), ObsPart('a', (1, 2, 2), np.dtype(np.uint8), 2),
           ObsPart('c', (), np.dtype(np.int32), 6))
  obs = np.float32([[[0, 1, 5, 6, 7, 255, -3]]])
  for split in (take_apart(obs, parts), jax.jit(lambda obs: take_apart(obs, parts))(obs)):
    assert_array_equal(split['b'], [[[False, True]]])
    assert_array_equal(split['a'], [[[[[5, 6], [7, 255]]]]])
    assert_array_equal(split['c'], [[-3]])
    assert [split[name].dtype for name in 'bac'] == [bool, np.uint8, np.int32]
  with pytest.raises(AssertionError):
    take_apart(obs[..., 1:], parts)


def test_a_torso_of_images_and_vectors_by_hand():
  """The image is 1 x 2 pixels with one channel and values up to 10; the kernel is 1x1."""
  parts = (ObsPart('image', (1, 2, 1), np.dtype(np.uint8), 0, True),
           ObsPart('flags', (2,), np.dtype(bool), 2), ObsPart('text', (1,), np.dtype(np.uint8), 4),
           ObsPart('facing', (3,), np.dtype(bool), 5), ObsPart('clock', (), np.dtype(np.int32), 8))
  torso = networks.ImageAndVector(channels=(1,), kernel=1, largest=10.0, image_hidden=1,
                                  vector_hidden=(1,), parts=parts)
  params = {'params': {
      'Conv_0': {'kernel': np.full((1, 1, 1, 1), 2, np.float32), 'bias': np.float32([0])},
      'Dense_0': {'kernel': np.float32([[1], [10]]), 'bias': np.float32([0.5])},
      'MLP_0': {'Dense_0': {
          'kernel': np.float32([[1], [2], [0.5], [7], [8], [-1.1], [0.125]]),
          'bias': np.float32([0])}}}}
  out = torso.apply(params, np.float32([[1, 3, 0, 1, 51, 0, 0, 1, 4]]))
  np.testing.assert_allclose(out, [[0.2 + 6 + 0.5, np.tanh(2 + 0.5 * 0.2 - 1.1 + 0.5)]], rtol=1e-6)


def test_an_own_torso_can_ask_for_parts_and_layout():
  from tests.envs.own_torso import Asks
  minigrid = envpool_envs.make_spec('MiniGrid-Empty-5x5-v0', {})
  assert networks.fit_to_task(Asks(), minigrid).parts == minigrid.parts
  assert networks.fit_to_task(Asks(), envpool_envs.make_spec('CarRacing-v2', {})).channels_last
  assert networks.fit_to_task(networks.MLP(), minigrid).hidden == (64, 64)


@pytest.mark.parametrize('task, message', [
    ('CartPole-v1', r'network\.name: image_and_vector wants observations of several parts'),
    ('CarRacing-v2', r'network\.name: image_and_vector wants observations of several parts')])
def test_a_torso_of_parts_needs_an_image_among_them(task, message):
  with pytest.raises(ValueError, match=message):
    resolve(config_of(task, 'image_and_vector', {}))


# Actions.


@pytest.mark.parametrize('task, choices', [
    ('Cleaner-v0', (4, 4, 4)), ('FlatPack-v0', (25, 4, 9, 9)), ('Jumanji/Tetris-v0', (4, 10)),
    ('Jumanji/MultiCVRP-v0', (21, 21))])
def test_vectors_of_integers_are_choices(task, choices):
  spec = envpool_envs.make_spec(task, {})
  assert (spec.num_actions, spec.action_low, spec.action_choices) == (0, (), choices)
  assert resolve(config_of(task, 'mlp', {})).policy.dist_size == sum(choices)


@pytest.mark.parametrize('task', ['Cleaner-v0', 'Jumanji/Minesweeper-v0', 'Jumanji/MultiCVRP-v0'])
def test_choices_reach_the_task(task):
  spec, rollout = roll(task)
  dtype = envpool.make_spec(task).action_space.dtype
  parts = take_apart(rollout.obs, spec.parts)
  steps = steps_of_the_python_api(task, {}, rollout.action.astype(dtype))
  for t, (obs, reward) in enumerate(steps):
    assert_array_equal(parts['action_mask'][t], obs['action_mask'])
    if t and rollout.valid[t - 1].all():
      assert_array_equal(rollout.reward[t - 1], reward)


def test_actions_of_two_axes_are_sent_in_their_shape():
  task = 'Jumanji/SearchAndRescue-v0'
  spec, rollout = roll(task)
  shape = envpool.make_spec(task).action_space.shape
  assert len(shape) == 2 and len(spec.action_low) == np.prod(shape)
  policy = resolve(config_of(task, 'mlp', {})).policy
  actions = np.asarray(policy.to_env(rollout.action)).reshape(STEPS, NUM_ENVS, *shape)
  parts = take_apart(rollout.obs, spec.parts)
  for t, (obs, _) in enumerate(steps_of_the_python_api(task, {}, actions)):
    assert_array_equal(parts['positions'][t], obs['positions'])


@pytest.mark.parametrize('loss, message', [
    ('dqn', r'loss\.name: .* wants discrete actions; those of Cleaner-v0 are vectors of choices'),
    ('dpg', r'loss\.name: .* wants continuous actions; those of Cleaner-v0 are vectors of')])
def test_a_loss_that_cannot_learn_vectors_of_choices_is_refused(loss, message):
  from podracer_jit.losses import ALGORITHMS
  name = next(name for name in ALGORITHMS if loss in name)
  config = small(name, 'Cleaner-v0', 'mlp' if loss == 'dqn' else 'deterministic')
  with pytest.raises(ValueError, match=message):
    resolve(config)


# Rewards of resets.


def test_a_reset_has_no_reward():
  """MetaWorld itself gives a reward of 1.3."""
  task = 'MetaWorld/Assembly-v3'
  options = dict(max_episode_steps=3)
  _, rollout = roll(task, options, steps=9)
  assert (~rollout.valid).any() and (rollout.reward[rollout.valid] != 0).all()
  assert_array_equal(rollout.reward[~rollout.valid], 0)
  policy = resolve(config_of(task, 'mlp', options)).policy
  raw = [reward for _, reward in steps_of_the_python_api(
      task, options, np.asarray(policy.to_env(rollout.action)))][1:]
  assert np.stack(raw)[~rollout.valid].max() > 0.1  # EnvPool rewards resets


# Tasks that cannot be made.


@pytest.mark.parametrize('task, message', [
    ('BigfishEasy-v0', r'cannot be made here: .*Qt ?5.*[Ii]nstall'),
    ('VizdoomCustom-v1', r'cannot be made here: .*cfg_path, wad_path.*not supported')])
def test_a_missing_requirement_of_a_task_is_reported_in_one_line(task, message):
  try:
    envpool.make_spec(task)
  except Exception:  # noqa: BLE001 - an error of any kind
    with pytest.raises(ValueError, match=rf'env\.task: {task} {message}') as error:
      resolve(config_of(task, 'mlp', {}))
    assert '\n' not in str(error.value) and len(str(error.value)) < 400
  else:
    pytest.skip('this machine can make the task')


@pytest.mark.parametrize('task', ['Basic-v1', 'D1Basic-v1'])
def test_buttons_without_bounds_are_refused(task):
  with pytest.raises(ValueError, match='no bounds; set env.use_combined_action = True'):
    envpool_envs.make_spec(task, {})


START_GAMES = """
import scipy.linalg  # OpenBLAS starts threads
import numpy as np
from podracer_jit.envs import envpool_envs
for attempt in range(4):
  scipy.linalg.blas.sgemm(1.0, np.ones((512, 512), 'f'), np.ones((512, 512), 'f'))
  pool = envpool_envs.make_pool('D1Basic-v1', {'use_combined_action': True}, list(range(8)), 1)
  pool.reset()
  pool.close()
print('started')
"""


@pytest.mark.full
def test_vizdoom_games_start_while_openblas_has_threads():
  """Two simultaneous forks used to join the same thread of OpenBLAS twice, and hung."""
  try:
    assert run_in_new_process(START_GAMES, timeout=60).split() == ['started']
  except subprocess.TimeoutExpired:
    pytest.fail('the games do not start')


def test_vizdoom_games_find_their_folder(monkeypatch, tmp_path):
  """Two games that both made the folder killed the process: the second one exited."""
  monkeypatch.chdir(tmp_path)
  existed = []
  make = envpool.make

  def watched(*args, **kwargs):
    existed.append((tmp_path / '_vizdoom').is_dir())
    return make(*args, **kwargs)

  monkeypatch.setattr(envpool, 'make', watched)
  pool = envpool_envs.make_pool('D1Basic-v1', {'use_combined_action': True}, SEEDS, 1)
  pool.close()
  assert existed == [True]


def test_a_directory_in_which_vizdoom_cannot_write_is_reported(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / '_vizdoom').touch()
  with pytest.raises(ValueError, match='env.task: D1Basic-v1 keeps a folder _vizdoom in the direc'):
    envpool_envs.make_pool('D1Basic-v1', {'use_combined_action': True}, SEEDS, 1)


@pytest.mark.parametrize('task, message', [
    ('Cleaner-v0', '207 float32  4^3 choices, masked by action_mask'),
    ('FlatPack-v0', "25 x 4 x 9^2 choices, if env.action_mask is ''"),
    ('Taxi-v3', '500 uint8  6 actions'),
    ('MiniGrid-Empty-5x5-v0', '247 uint8 (image: image 7 x 7 x 3)  7 actions'),
    ('CarRacing-v2', '96 x 96 x 3 uint8  3 numbers from -1 to 1')])
def test_the_list_of_tasks_describes_observations_and_actions(task, message):
  assert envs_command.describe(task).endswith(message)


# Whole updates, in lockstep and with asynchronous actors.


@pytest.mark.full
@pytest.mark.parametrize('task, network, options, fields', [
    ('Cleaner-v0', 'mlp', {}, {}),
    ('Cleaner-v0', 'mlp', {}, dict(env_batch=4, scheme='cleanba')),
    ('MiniGrid-Empty-5x5-v0', 'image_and_vector', {}, {}),
    ('MetaWorld/Assembly-v3', 'mlp', dict(max_episode_steps=5),
     dict(env_batch=4, scheme='cleanba')),
])
def test_whole_updates_on_tasks_of_other_families(task, network, options, fields):
  """Parameters stay finite and resets have no reward, in lockstep and with asynchronous actors."""
  rollout_list = []

  def watch(call, carry, *batch):
    del call, carry
    for item in batch:
      rollout_list.extend(jax.device_get(item.value.parts[0]))

  config = small('impala' if fields else 'ppo', task, network, **{
      'num_shards': 1, 'num_grad_shards': 1} | {k: v for k, v in fields.items() if k != 'scheme'})
  config |= {name: fields[name] for name in ('scheme',) if name in fields}
  config['env'] |= options
  config['network'] |= SIZES[network]
  _, reports, state = run(config, updates=3, tamper=wrap('learner', before=watch))
  assert len(reports) >= 1
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))
  rewards = np.concatenate([rollout.reward[~rollout.valid] for rollout in rollout_list])
  assert_array_equal(rewards, 0)
  if options:
    assert len(rewards)


def test_products_of_discrete_spaces_are_concatenated_one_hots():
  """No task of EnvPool 1.2.5 has such a space, so the spaces are made with gymnasium."""
  from gymnasium import spaces
  numbers = np.int32([[2, 0, 4], [1, 1, 5]])
  expected = np.concatenate([one_hot(numbers[:, 0], 3), one_hot(numbers[:, 1], 2),
                             one_hot(numbers[:, 2] - 4, 2)], axis=1)
  pair = spaces.Tuple([spaces.Discrete(3), spaces.Discrete(2), spaces.Discrete(2, start=4)])
  vector = spaces.MultiDiscrete([3, 2, 2])
  for space, obs in ((pair, tuple(numbers.T)), (vector, numbers - np.int32([0, 0, 4]))):
    leaves = env_spaces.leaves_of('X-v0', space)
    shape, dtype, parts = env_spaces.layout('X-v0', space)
    assert (shape, dtype) == ((7,), np.uint8)
    assert [part.name for part in parts] == ['0', '1', '2']
    assert_array_equal(env_spaces.observe(obs, space, leaves), expected)
    on_device = jax.jit(lambda obs, space=space, leaves=leaves: env_spaces.observe(
        obs, space, leaves))(jax.tree.map(jnp.asarray, obs))
    assert_array_equal(on_device, expected)


def test_a_dict_of_bytes_is_observed_as_bytes():
  from gymnasium import spaces
  box = spaces.Box(0, 255, (2,), np.uint8)
  space = spaces.Dict({'a': box, 'b': spaces.Dict({'c': spaces.MultiBinary(3)})})
  assert env_spaces.layout('X-v0', space)[:2] == ((5,), np.uint8)
  obs = {'a': np.uint8([[200, 1]]), 'b': {'c': np.array([[True, False, True]])}}
  observed = env_spaces.observe(obs, space, env_spaces.leaves_of('X-v0', space))
  assert observed.dtype == np.uint8
  assert_array_equal(observed, [[200, 1, 1, 0, 1]])


# Shapes, whether their channels are last, and whether that is a guess.
IMAGES = {
    (84, 84, 4): (True, False), (4, 84, 84): (False, False), (1, 84, 84): (False, False),
    (4, 4, 31): (True, False), (31, 4, 4): (False, False), (2, 12, 12): (False, False),
    (10, 10, 10): (True, True), (3, 3, 3): (True, True),
    (210, 160, 3): (True, False), (3, 210, 160): (False, False), (12, 72, 128): (False, False),
    (72, 128, 12): (True, False), (3, 64, 96): (False, False), (3, 6, 7): (False, False),
    (5, 7, 10): (True, True), (9, 13, 16): (True, True), (16, 9, 13): (True, True),
    (10, 20, 10): (True, True), (4, 7, 9): (True, True)}


@pytest.mark.parametrize('shape', IMAGES)
def test_the_axis_of_an_images_channels_follows_from_its_shape(shape):
  assert (env_spaces.is_channels_last(shape), env_spaces.is_ambiguous(shape)) == IMAGES[shape]


def test_vectors_and_pictures_without_channels_have_no_axis_of_channels():
  for shape in ((), (3,), (4, 4), (2, 2, 2, 2)):
    assert not env_spaces.is_channels_last(shape) and not env_spaces.is_ambiguous(shape)


def test_a_number_in_a_dict_is_a_one_hot_as_in_a_tuple():
  from gymnasium import spaces
  numbers = {'a': spaces.Discrete(3, start=2), 'b': spaces.Dict(c=spaces.Discrete(2))}
  space = spaces.Dict(numbers | {'d': spaces.Box(-1, 1, (1,), np.float32)})
  leaves = env_spaces.leaves_of('X-v0', space)
  obs = {'a': np.int64([4, 2]), 'b': {'c': np.int64([0, 1])}, 'd': np.float32([[0.5], [-1]])}
  expected = [[0, 0, 1, 1, 0, 0.5], [1, 0, 0, 0, 1, -1]]
  assert_array_equal(env_spaces.observe(obs, space, leaves), expected)
  assert_array_equal(env_spaces.observe_one(
      {'a': 4, 'b': {'c': 0}, 'd': np.float32([0.5])}, space, leaves), expected[0])
  shape, dtype, parts = env_spaces.layout('X-v0', space)
  assert (shape, dtype) == ((6,), np.float32)
  assert [(part.name, part.shape, part.dtype, part.start) for part in parts] == [
      ('a', (3,), bool, 0), ('b/c', (2,), bool, 3), ('d', (1,), np.float32, 5)]


def test_an_array_alone_in_a_dict_or_tuple_keeps_its_shape_and_type():
  from gymnasium import spaces
  box = spaces.Box(0, 255, (3, 5, 5), np.uint8)
  image = np.arange(150).reshape(2, 3, 5, 5).astype(np.uint8)
  for space, obs in ((spaces.Dict(x=box), {'x': image}), (spaces.Tuple((box,)), (image,)),
                     (spaces.Dict(a=spaces.Tuple((spaces.Dict(b=box),))), {'a': ({'b': image},)})):
    assert env_spaces.layout('X-v0', space) == ((3, 5, 5), np.uint8, ())
    leaves = env_spaces.leaves_of('X-v0', space)
    assert_array_equal(env_spaces.observe(obs, space, leaves), image)
    assert_array_equal(env_spaces.observe_one(
        jax.tree.map(lambda x: x[1], obs), space, leaves), image[1])
    assert env_spaces.is_array(space) and env_spaces.array_in(obs, space) is image
  counts = spaces.Dict(x=spaces.Box(-9, 9, (2,), np.int32))
  assert env_spaces.layout('X-v0', counts) == ((2,), np.int32, ())
  # A number that is alone is a one-hot, and two arrays are a flat vector.
  assert env_spaces.layout('X-v0', spaces.Dict(x=spaces.Discrete(4))) == ((4,), np.uint8, ())
  assert env_spaces.layout('X-v0', spaces.Dict(x=box, y=box))[0] == (150,)


@pytest.mark.parametrize('values, remedy', [
    (40_000, r'two digits, MultiDiscrete\(\[200, 200\]\), of divmod\(number, 200\)'),
    (4097, r'MultiDiscrete\(\[65, 65\]\)'), (10**9, 'several digits, a MultiDiscrete')])
def test_a_number_with_too_many_values_is_refused_with_the_way_out(values, remedy):
  from gymnasium import spaces
  number = spaces.Discrete(values)
  for space, name in ((number, ''), (spaces.Dict(a=spaces.Tuple((number,))), r'\(a/0\) '),
                      (spaces.MultiDiscrete([2, values]), r'\(1\) ')):
    with pytest.raises(ValueError, match=(
        rf'^env\.task: the observations of X-v0 have a number {name}with {values:,} values.*; at '
        rf'most 4,096 .*{remedy}.* a Box$')) as error:
      env_spaces.layout('X-v0', space)
    assert '\n' not in str(error.value)
  assert env_spaces.layout('X-v0', spaces.Discrete(4096))[0] == (4096,)


def test_places_of_one_hots():
  from gymnasium import spaces
  space = spaces.Dict(a=spaces.Discrete(3, start=2), b=spaces.MultiDiscrete([2, 3]),
                      c=spaces.Box(-1, 1, (2,), np.float32), d=spaces.MultiBinary(4))
  assert env_spaces.one_hots(space) == (slice(0, 3), slice(3, 5), slice(5, 8))
  assert env_spaces.one_hots(spaces.Dict(a=spaces.Discrete(3))) == (slice(0, 3),)
  assert env_spaces.one_hots(spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float32))) == ()


def test_changes_of_the_layout_since_version_0_6():
  from gymnasium import spaces
  def change(space, shape, sees_images=True):
    return env_spaces.change_of_layout(1, space, shape, sees_images, reads_pixels=True)
  box = spaces.Box(-1, 1, (2,), np.float32)
  cube = spaces.Box(0, 255, (10, 10, 10), np.uint8)
  number = spaces.Discrete(3)
  assert 'one-hot' in change(spaces.Dict(a=number, b=box), (5,))
  assert 'one-hot' in change(spaces.Tuple((box, spaces.Dict(a=number))), (5,))
  assert 'keeps its shape' in change(spaces.Dict(a=spaces.Box(0, 1, (1, 4, 4))), (1, 4, 4))
  assert 'keeps its shape' in change(spaces.Dict(a=spaces.Box(0, 9, (2,), np.int32)), (2,))
  assert '(10, 10, 10) is (H, W, C)' in change(cube, (10, 10, 10))
  assert '(5, 7, 10) is (H, W, C)' in change(spaces.Box(0, 1, (5, 7, 10)), (5, 7, 10))
  assert '(10, 10, 10)' in change(spaces.Dict(a=cube, b=box), (1002,))
  for space, shape in ((box, (2,)), (spaces.Dict(a=box), (2,)), (spaces.Dict(a=box, b=box), (4,)),
                       (spaces.Tuple((number, box)), (5,)), (number, (3,)),
                       (spaces.Dict(a=spaces.MultiDiscrete([2, 3]), b=box), (7,)),
                       (spaces.Box(0, 1, (84, 84, 3)), (84, 84, 3)),
                       (spaces.Box(0, 1, (3, 64, 96)), (3, 64, 96))):
    assert not change(space, shape)
  assert not change(cube, (10, 10, 10), sees_images=False)


def test_changes_of_the_layout_since_version_0_8():
  from gymnasium import spaces
  def change(space, reads_pixels=True):
    shape, *_ = env_spaces.layout('X-v0', space)
    return env_spaces.change_of_layout(2, space, shape, True, reads_pixels)
  bits, bytes_of_bits = spaces.MultiBinary([4, 4, 3]), spaces.Box(0, 1, (4, 4, 3), np.uint8)
  vector, flags = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 1, (2,), np.uint8)
  for space in (bits, bytes_of_bits, spaces.Dict(x=bits), spaces.Dict(x=bytes_of_bits, y=vector),
                spaces.Tuple((vector, spaces.Dict(x=flags, y=vector)))):
    assert change(space) == 'bytes from 0 to 1 are bits now, and were read as bytes up to 255'
    assert not change(space, reads_pixels=False)
  for space in (spaces.MultiBinary(4), spaces.Box(0, 1, (4, 4, 3), bool), spaces.Discrete(3), flags,
                spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Dict(x=bits, y=vector),
                spaces.Dict(a=spaces.Discrete(3), b=vector)):
    assert not change(space)


@pytest.mark.parametrize('task, network, fields, reads', [
    ('CartPole-v1', 'mlp', {}, False), ('CartPole-v1', 'simba', {}, False),
    ('CartPole-v1', 'mlp', dict(normalise__obs=True), True), ('Pong-v5', 'nature_cnn', {}, True),
    ('CartPole-v1', 'tests.envs.own_torso:Asks', {}, True)])
def test_networks_that_may_tell_bytes_from_other_numbers(task, network, fields, reads):
  experiment = resolve(changed(small('ppo', task, network), **fields))
  assert workdir_lib._reads_pixels(experiment) == reads  # noqa: SLF001


def test_other_observations_are_refused_in_one_line():
  from gymnasium import spaces
  with pytest.raises(ValueError, match=r'env\.task: the observations of X-v0 are Text; only'):
    env_spaces.layout('X-v0', spaces.Dict({'a': spaces.Text(5)}))
