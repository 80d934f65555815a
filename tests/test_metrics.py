"""The table of metrics is complete: it has what algorithms and sinks write, and nothing else."""

import functools
import re
import types

import jax
import numpy as np
import pytest

from podracer_jit import metrics
from podracer_jit.cluster.ray_cluster import Cluster
from podracer_jit.experiment import build
from podracer_jit.learner import sharding
from podracer_jit.losses import ALGORITHMS
from podracer_jit.numerics import counters
from podracer_jit.play import evaluation
from podracer_jit.schemes.reports import Report
from podracer_jit.training.meter import DEVICE_MEMORY, Meter, device_memory
from podracer_jit.training.sinks import EVAL_WAIT_S, WARNING
from tests.runs import fresh, small

CONTINUOUS = ('dpg', 'sac', 'td3')
GROUPS = {'charts', 'losses', 'replay', 'cluster', 'time', 'eval', ''}


@functools.cache
def written(loss):
  """Returns the names in the records of an algorithm, from the shapes of its update.

  An option of the optimizer is a schedule, and the weight of the entropy if there is one.
  """
  config = small(loss, 'Pendulum-v1' if loss in CONTINUOUS else 'CartPole-v1',
                 'deterministic' if loss == 'dpg' else 'mlp')
  config |= {'scheme': 'fused', 'num_minibatches': 1}
  config['optimizer']['max_grad_norm'] = 'linear:1:0.5'
  if 'entropy_coef' in config['loss']:
    config['loss']['entropy_coef'] = 'linear:0.1:0.01'
  run = fresh(config)
  learner = run.learner
  rollout = run.acting.rollout([build.vector_env_of_shapes(run.experiment)])
  update = sharding.make_fused(learner.algorithm.for_actors, rollout, learner.learn, 1)
  state = learner.state_shapes()._replace(replay=learner.replay_shapes())
  total = counters.of(run.experiment.total_steps, np.zeros(state.steps.shape, state.steps.dtype))
  shapes = jax.eval_shape(update, state, build.shapes_of_pool(run.experiment, run.acting), 1, total)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes[-1])
  record, _ = next(Meter(run.experiment, {}).records(Report(zeros, 1, (0.0,), (0.0,))))
  return record.keys()


@pytest.mark.parametrize('loss', ALGORITHMS)
def test_all_that_an_algorithm_writes_is_in_the_table(loss):
  names = written(loss)
  schedules = {name for name in names if name.startswith(('loss.', 'optimizer.'))}
  assert schedules
  assert names - schedules <= metrics.UPDATES.keys()
  assert not schedules & metrics.UPDATES.keys()
  assert all(metrics.shown(name) == f'charts/{name}' for name in schedules)


def test_all_that_is_in_the_table_is_written():
  cluster = Cluster.metrics(types.SimpleNamespace(
      _look_at_spills=lambda: None, _remotes=(), _last=(0.0, 0, 0, 0.0),
      counters=types.SimpleNamespace(nbytes=0, gets=0, get_s=0.0, restarts=0)))
  of_algorithms = {name for loss in ALGORITHMS for name in written(loss) if '.' not in name}
  assert of_algorithms | cluster.keys() | {WARNING, EVAL_WAIT_S, DEVICE_MEMORY} == {
      name for name in metrics.UPDATES if '.' not in name}


def test_memory_of_devices_is_that_of_the_fullest():
  def device(**stats):
    return types.SimpleNamespace(memory_stats=lambda: stats or None)
  assert device_memory(jax.local_devices()) == {}
  full = device(bytes_in_use=10, peak_bytes_in_use=3_000_000)
  assert device_memory([device(peak_bytes_in_use=2_000_000), full, device(), device(pool_bytes=9)]
                       ) == {DEVICE_MEMORY: 3.0}


def test_all_that_evaluations_write_is_in_the_table_and_nothing_else():
  episodes = evaluation.Episodes([1.0, np.inf], [3, 4])
  written_by_evaluator = {'update', 'steps', 'num_episodes', 'seconds', 'video', 'error'}
  assert written_by_evaluator | evaluation.statistics('Pong-v5', episodes).keys() == (
      metrics.EVALUATIONS.keys())


@pytest.mark.quick
def test_names_people_know():
  assert {name: metrics.shown(name) for name in (
      'episode_return', 'sps', 'value_loss', 'baseline_loss', 'replay_size', 'wall_s')} == {
          'episode_return': 'charts/episodic_return', 'sps': 'charts/SPS',
          'value_loss': 'losses/value_loss', 'baseline_loss': 'losses/value_loss',
          'replay_size': 'replay/size', 'wall_s': 'time/wall_s'}
  assert metrics.shown('my_term') == 'losses/my_term' and metrics.shown('steps') == ''
  # A user's term may have the name of a field of evaluations.
  assert metrics.shown('mean') == 'losses/mean'


def test_each_row_is_whole():
  assert metrics.TABLE.keys() == metrics.UPDATES.keys() | metrics.EVALUATIONS.keys()
  for name, metric in metrics.TABLE.items():
    assert metric.name == name and metric.meaning
    assert metric.shown.partition('/')[0] in GROUPS, name
  # Only critics' losses of different algorithms share a curve.
  shown = [metric.shown for metric in metrics.TABLE.values() if metric.shown]
  assert {name for name in shown if shown.count(name) > 1} == {'losses/value_loss'}


def test_texts_name_fields_that_exist():
  fields = {f'{section}.{name}' for section, values in (
      small('sac') | {'normalise': small()['normalise']}).items() if isinstance(values, dict)
      for name in values} | {f'loss.{name}' for loss in ('ppo', 'impala')
                             for name in small(loss)['loss']}
  named = {field for metric in metrics.TABLE.values()
           for field in re.findall(r'`(\w+\.\w+)`', f'{metric.meaning} {metric.unusual}')}
  assert named and named <= fields
