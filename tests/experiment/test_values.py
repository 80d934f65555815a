"""With any values of its fields, a config is accepted, or refused in one line that names a field.

The tests resolve and build experiments and estimate their memory. They compile nothing, and
allocate little.
"""

import copy
import functools
import itertools
import math
import re
import resource
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podracer_jit import options
from podracer_jit.experiment import build, checks, config_dict, flags, memory, schema
from podracer_jit.experiment.resolve import resolve
from tests.runs import small

MOST_GROWTH = 500e6  # bytes of memory, by all examples together

# A config of each algorithm and kind of network, with options of the task's own.
CONFIGS = {
    'impala_catch:smoke': ('max_episode_steps', 'height', 'width'),
    'ppo_cartpole': ('max_episode_steps',),
    'apex_dqn_catch': ('height', 'width'),
    'apex_dpg_cartpole_swingup': ('max_episode_steps', 'frame_skip'),
    'impala_memory': ('max_episode_steps', 'agent_view_size'),
    'r2d2_memory': ('max_episode_steps', 'agent_view_size'),
    'pong_laptop': ('img_height', 'img_width', 'stack_num', 'frame_skip', 'noop_max',
                    'max_episode_steps', 'repeat_action_probability')}
RESOLVED_ONLY = ('pong_laptop',)  # its convolutions take long to trace

HUGE = (2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 10**22)
INTS = st.one_of(
    st.integers(-2, 300), st.integers(0, 80).map(lambda k: 2**k), st.sampled_from(HUGE),
    st.sampled_from((3, 1000, 10**5, 10**6, 10**7, 10**9, -1, -2**31, -2**31 - 1, -2**63 - 1,
                     10**400, 10**5000)))
FLOATS = st.one_of(
    st.floats(), st.floats(0, 2), st.sampled_from((math.nan, math.inf, -math.inf, -0.0, 1e39, 1e308,
                                                  1e-60, 0.99999999)))
TEXTS = st.one_of(
    st.text(max_size=12), st.sampled_from(('', 'a\nb', 'x' * 10**6, 'a:b', ':', '\0')))
TUPLES = st.one_of(
    st.lists(INTS, max_size=4).map(tuple), st.lists(FLOATS, max_size=2).map(tuple),
    st.sampled_from(((), (0,) * 10**6, (64,) * 101, (2**20,) * 100, (10**6, 10**6), (0, 1), (7, 8),
                     ('a',), ((1,),))))
OTHERS = st.sampled_from((None, {}, {'a': 1}, [], [64], True, False))


@functools.cache
def shipped(name):
  """Returns a shipped config as plain values, on one device."""
  fields = config_dict.plain(flags.load_config(name))
  return fields | {'placement': fields['placement'] | schema.ONE_DEVICE}


@functools.cache
def values_of(name):
  """Returns the config's fields with their values."""
  options = {f'env.{option}': 1 for option in CONFIGS[name]}
  return options | {field: value for field, value, _ in schema.describe(shipped(name))}


ANY = st.one_of(INTS, FLOATS, TEXTS, TUPLES, OTHERS)


def values_like(value):
  """Returns a strategy for a field that has `value`; it mostly draws values of the same type."""
  strategies = ((bool, st.booleans()), (int, INTS), (float, FLOATS), (str, TEXTS))
  same_type = next((strategy for kind, strategy in strategies if isinstance(value, kind)), TUPLES)
  return st.integers(0, 7).flatmap(lambda n: same_type if n else ANY)


@st.composite
def changes(draw):
  """Draws a config and one to three of its fields with new values."""
  name = draw(st.sampled_from(sorted(CONFIGS)))
  values = values_of(name)
  fields = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3, unique=True))
  return name, {field: draw(values_like(values[field])) for field in fields}


def outcome(name, changed):
  """Returns the line that refuses a changed config, or '' if it is accepted."""
  fields = copy.deepcopy(shipped(name))
  for field, value in changed.items():
    section, _, option = field.rpartition('.')
    (fields[section] if section else fields)[option] = value
  try:
    experiment = resolve(fields)
    if name in RESOLVED_ONLY:
      return ''
    run = build.make_run(experiment)
    memory.check(run)
    needed = sum(part.nbytes for part in memory.estimate(run))
    assert 0 < needed <= memory.host_memory()
  except ValueError as error:
    line = str(error)
    assert '\n' not in line and len(line) < 400, line
    assert re.match(r'[a-z]\w*(\.\w+)?: .', line), line
    assert line.split(':')[0] in values_of(name) or line.startswith('env.task: '), line
    return line
  return ''


@pytest.fixture(scope='module', autouse=True)
def little_memory():
  """Asserts that no example allocates much."""
  outcome('pong_laptop', {})  # loads all libraries
  outcome('impala_memory', {})
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with mock.patch.object(memory, 'host_memory', lambda: 24 * 10**9):
    yield
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert (after - before) * 1024 < MOST_GROWTH


def of_examples(count):
  return settings(max_examples=count, derandomize=True, database=None, deadline=None,
                  suppress_health_check=list(HealthCheck))


@of_examples(50)
@given(changes())
def test_any_value_is_accepted_or_refused_in_one_line(case):
  outcome(*case)


@pytest.mark.full
@of_examples(200)
@given(changes())
def test_any_of_more_values_is_accepted_or_refused_in_one_line(case):
  outcome(*case)


BOUNDED = {
    'impala_catch:smoke': (
        'placement.actors_per_device', 'env.num_envs', 'unroll_length', 'num_minibatches',
        'num_epochs', 'num_shards', 'num_grad_shards', 'env_batch', 'microbatch_rows',
        'total_steps', 'seed', 'log.window', 'checkpoint.keep', 'checkpoint.every_updates',
        'eval.every_updates', 'env.renew_every_updates',
        'placement.env_threads', 'placement.xla_threads', 'placement.updates_per_call',
        'env.max_episode_steps', 'env.height'),
    'impala_memory': ('network.core_size',),
    'pong_laptop': ('network.hidden', 'env.img_height', 'env.stack_num', 'env.noop_max'),
    'apex_dqn_catch': ('loss.n_step', 'loss.target_every', 'replay.capacity', 'replay.min_size',
                       'replay.batch_size', 'replay.gradient_steps', 'replay.params_every',
                       'replay.tolerance')}


@pytest.mark.quick
@pytest.mark.parametrize('name', BOUNDED)
def test_a_huge_number_is_refused_with_the_name_of_its_field(name):
  for field, value in itertools.product(BOUNDED[name], (2**31, 10**22)):
    if (field, value) == ('total_steps', 2**31):
      continue  # counts of steps have more bits
    assert re.match(f'{re.escape(field)}: must be (at most|below) .*, got {value}$',
                    outcome(name, {field: value}))


def test_every_integer_option_has_an_upper_bound():
  parts = {part for choice in schema.CHOICES.values() for part in choice.shipped.values()}
  sections = {*schema.SECTIONS.values(), schema.TrainingOptions, schema.EnvOptions,
              schema.ReplayOptions, schema.TorsoOptions}
  for part in parts | sections:
    for name, meaning in options.meanings(part).items():
      default = options.defaults(part)[name]
      if isinstance(default, int | tuple) and not isinstance(default, bool):
        assert meaning.at_most is not None, f'{part.__name__}.{name}'


@pytest.mark.parametrize('name, changed, message', [
    ('impala_catch:smoke', {'network.hidden': (10**6, 10**6)},
     'network.hidden: the run needs at least 16,001 GB of memory: parameters and'),
    ('impala_memory', {'network.core_size': 10**6}, 'network.core_size: the run needs at least'),
    ('impala_catch:smoke', {'network.hidden': (64,) * 10**6},
     'network.hidden: must have at most 100 numbers, got (64, 64, 64'),
    ('impala_catch:smoke', {'placement.actor_devices': (0,) * 10**6},
     'placement.actor_devices: must be a tuple of device indices below 1024'),
    ('impala_catch:smoke', {'unroll_length': 2**31 - 2}, 'unroll_length: the 2147483646 rows of '),
    ('impala_catch:smoke', {'unroll_length': 10**7}, 'unroll_length: the run needs at least 14'),
    ('impala_catch:smoke', {'total_steps': 10**15}, 'total_steps: 1,000,000,000,000,000 steps of '
     '640 rows an update may take 3,125,000,000,000 updates, which must be below 2^31; take more '),
    ('impala_catch:smoke', {'placement.actor_devices': (0,) * 100,
                            'placement.actors_per_device': 1000},
     'placement.actors_per_device: 1000 actors on each of 100 devices are 100000; must be at most'),
    ('impala_catch:smoke', {'placement.env_threads': 1024, 'num_shards': 32},
     'placement.env_threads: 1024 threads of each pool (num_shards = 32) are 32,768; must be at '),
    ('ppo_cartpole', {'num_epochs': 10**4, 'num_minibatches': 2**31 - 1},
     'num_minibatches: 2147483647 in each of num_epochs = 10000 are 21,474,836,470,000; must be '),
    ('ppo_cartpole', {'num_epochs': 10**4, 'unroll_length': 2**17},
     'num_epochs: the run needs at least 8'),
    ('ppo_cartpole', {'placement.updates_per_call': 10**6, 'env.renew_every_updates': 10**6,
                      'unroll_length': 2**12}, 'placement.updates_per_call: the run needs at '),
    ('apex_dqn_catch', {'replay.capacity': 2**31 - 1}, 'replay.capacity: 2147483647 '),
    ('apex_dqn_catch', {'replay.capacity': 2 * 10**9}, 'replay.capacity: the run needs at least'),
    ('apex_dqn_catch', {'replay.gradient_steps': 10**9}, 'replay.gradient_steps: 1000000000 with'),
    ('apex_dqn_catch', {'replay.batch_size': 10**9}, 'replay.batch_size: the run needs at least'),
    ('pong_laptop', {'env.img_height': 10**4, 'env.img_width': 10**4},
     'env.img_height: with the other options of Pong-v5 an observation has 400,000,000 bytes'),
    ('pong_laptop', {'env.repeat_action_probability': math.inf},
     'env.repeat_action_probability: must be a finite number, got inf'),
    ('impala_catch:smoke', {'env.height': -1}, 'env.height: with -1 observations have the shape'),
    ('impala_catch:smoke', {'optimizer.learning_rate': 1e39},
     'optimizer.learning_rate: must be at most 3.4e+38, got 1e+39'),
    ('impala_catch:smoke', {'optimizer.learning_rate': 10**400},
     'optimizer.learning_rate: must be finite and at least 0, got 1000'),
    ('impala_catch:smoke', {'seed': 10**5000}, 'seed: must be below 2^31, got a number of more ')])
def test_values_that_are_too_large_together_are_refused(name, changed, message):
  assert outcome(name, changed).startswith(message)


ONE_ROW = 'of an epoch: its only advantage is not normalised .* it must be '


@pytest.mark.parametrize('changed, message', [
    # A minibatch is over all gradient groups.
    ({'num_minibatches': 16}, rf'num_minibatches: .* has 1 of the 16 rows .*{ONE_ROW}at most 8$'),
    ({'num_minibatches': 8}, ''),
    ({'num_minibatches': 8, 'num_grad_shards': 2}, ''),
    ({'num_minibatches': 16, 'loss.normalise_advantage': False}, ''),
    ({'num_minibatches': 15, 'unroll_length': 15, 'env.num_envs': 1},
     rf'num_minibatches: .* has 1 of the 15 rows .*{ONE_ROW}at most 5$'),
    ({'num_minibatches': 1, 'unroll_length': 1, 'env.num_envs': 1},
     rf'unroll_length: .* has 1 of the 1 rows .*{ONE_ROW}longer, or env.num_envs larger$'),
    # An element of a recurrent network is an environment, with all its rows.
    ({'num_minibatches': 4, 'network.core': 'gru'}, ''),
    ({'num_minibatches': 4, 'network.core': 'gru', 'unroll_length': 1},
     rf'num_minibatches: .* has 1 of the 4 rows .*{ONE_ROW}at most 2$'),
    # Workers with updates of their own have minibatches of their own.
    ({'num_minibatches': 8, 'num_grad_shards': 2, 'num_shards': 2, 'scheme': 'dppo_async',
      'placement.actor_devices': (0, 1), 'placement.learner_devices': (0, 1)},
     rf'num_minibatches: .* has 1 of the 8 rows .*{ONE_ROW}at most 4$')])
def test_the_advantage_of_a_minibatch_of_one_row_is_not_normalised(changed, message):
  notes = [line for line in notes_of('ppo_cartpole', {
      'env.num_envs': 4, 'unroll_length': 4, 'scheme': 'sync'} | changed)
           if 'rows of an epoch' in line]
  assert len(notes) == bool(message) and all(re.match(message, line) for line in notes)


def notes_of(name, changed):
  """Returns the notes about a config with some values changed."""
  fields = copy.deepcopy(shipped(name))
  for field, value in changed.items():
    *path, last = field.split('.')
    part = fields
    for key in path:
      part = part[key]
    part[last] = value
  return list(checks.notes(resolve(fields)))


@pytest.mark.parametrize('every, count', [(0, 1), (100, 0)])
def test_films_of_evaluations_that_are_never_made_are_noted(every, count):
  notes = notes_of('ppo_cartpole', {'eval.video_every': 1, 'eval.every_updates': every})
  assert [line.partition(':')[0] for line in notes] == ['eval.video_every'] * count


SEGMENTS = {'env.num_envs': 4, 'unroll_length': 16, 'env.renew_every_updates': 2,
            'total_steps': 10_000, 'scheme': 'sync'}


@pytest.mark.parametrize('changed, note', [
    ({}, 'env.renew_every_updates: .* after 32 steps of each; episodes of CartPole-v1 may take 500 '
         'steps, and a longer one than 32 never ends; with 32 or more, or 0, all of them can end$'),
    ({'env.renew_every_updates': 31}, ''),  # 496 of 500 steps
    ({'env.renew_every_updates': 0}, ''),  # one segment
    ({'total_steps': 128}, ''),  # one segment
    ({'env.task': 'gymnasium:CartPole-v1'}, 'env.renew_every_updates: '),
    ({'env.task': 'gymnax:CartPole-v1'}, ''),  # goes on over segments
    ({'env.task': 'gymnax:CartPole-v1', 'scheme': 'impala'}, 'env.renew_every_updates: ')])
def test_segments_shorter_than_episodes_are_noted(changed, note):
  notes = notes_of('ppo_cartpole', SEGMENTS | changed)
  assert len(notes) == bool(note) and all(re.match(note, line) for line in notes)


@pytest.mark.parametrize('rows, elements, note', [
    (64, 101, 'microbatch_rows: 64 rows allow 64 elements .* the 101 elements of a group '
              r'\(env.num_envs \* unroll_length / num_grad_shards / num_minibatches\) .* take 101 '
              'passes of 1, .*; 102 elements would take 2, and microbatch_rows = 101 one'),
    (64, 95, 'microbatch_rows: .* 5 passes of 19, .*; 96 elements would take 2, '),
    (64, 96, ''), (64, 67, 'microbatch_rows: .* 67 passes of 1'), (64, 61, ''), (0, 101, ''),
    (1, 101, ''), (101, 101, '')])
def test_uneven_microbatches_are_noted(rows, elements, note):
  notes = notes_of('ppo_cartpole', {
      'env.num_envs': 1, 'unroll_length': elements, 'num_minibatches': 1, 'num_shards': 1,
      'num_grad_shards': 1, 'scheme': 'sync', 'microbatch_rows': rows, 'total_steps': 1})
  assert len(notes) == bool(note) and all(re.match(note, line) for line in notes)


def test_uneven_microbatches_of_a_replay_are_noted():
  (note,) = notes_of('apex_dqn_catch', {'replay.batch_size': 101, 'microbatch_rows': 64,
                                        'num_grad_shards': 1})
  assert re.match(r'microbatch_rows: .* \(replay.batch_size / num_grad_shards\) .* 101 passes',
                  note)


def test_no_shipped_config_has_a_note_about_images_or_microbatches():
  for name in CONFIGS:
    assert not [line for line in notes_of(name, {}) if not line.startswith('env.renew_')]


@pytest.mark.parametrize('network, note', [
    ('nature_cnn', r'env.task: images \(10, 10, 10\) of .* are read as \(height, width, channels\)'
                   r', with 10 channels last; .* numpy.moveaxis\(obs, 0, -1\)'),
    ('mlp', '')])
def test_an_image_that_can_be_read_in_two_ways_is_noted(network, note):
  fields = small('ppo', 'gymnax:Seaquest-MinAtar', network)
  if network == 'nature_cnn':
    fields['network'] |= {'kernels': (3,), 'strides': (1,), 'channels': (4,), 'hidden': 8}
  notes = list(checks.notes(resolve(fields)))
  assert len(notes) == bool(note) and all(re.match(note, line) for line in notes)


def test_large_values_that_fit_are_accepted():
  assert not outcome('impala_catch:smoke', {'env.num_envs': 2**14, 'unroll_length': 2})
  assert not outcome('apex_dqn_catch', {'replay.capacity': 2**24})
