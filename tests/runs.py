"""Short real runs in this process, for tests of whole schemes."""

import copy
import os

import jax
import numpy as np
from jax.sharding import Mesh

from podracer_jit import experiment, loops
from podracer_jit.agents import networks
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.numerics import deterministic
from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.runtime import placement
from podracer_jit.training import sinks, stopping
from podracer_jit.training.opening import Opened
from podracer_jit.training.trainer import Training
from podracer_jit.workdir import checkpoints, record
from podracer_jit.workdir import workdir as workdir_lib
from tests.flags import COMPILED_SOON

# The environment of processes that run for seconds; they cache more compiled programs than usual.
QUICK = os.environ | {'XLA_FLAGS': COMPILED_SOON,
                      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}


def small(loss='impala', task='CartPole-v1', network='mlp', **fields):
  """Returns a config of a few small updates."""
  config = experiment.config(loss, network, 'adam', unroll_length=8, num_minibatches=2,
                             scheme='sync', **fields).to_dict()
  config['env'] = {'task': task, 'num_envs': 8}
  config['checkpoint']['every_updates'] = 6
  if task == 'Pong-v5':
    config['env'] |= {'img_height': 21, 'img_width': 21, 'max_episode_steps': 12}
    config['network'] |= {'channels': (8,), 'hidden': 32}
    if network == 'nature_cnn':
      config['network'] |= {'channels': (8, 16), 'kernels': (4, 3), 'strides': (4, 1)}
  return config


def make_network(name, policy, moments=(), core='none', core_size=128, separate_critic=False,
                 **sizes):
  """Returns the actor-critic with the torso called `name`, whose options are `sizes`."""
  options = networks.TorsoOptions(core, core_size, separate_critic)
  return networks.actor_critic(networks.TORSOS[name](**sizes), policy, options, moments)


def changed(config, **fields):
  """Returns a copy with nested fields replaced, for example placement__actor_devices=(0, 1)."""
  config = copy.deepcopy(config)
  for name, value in fields.items():
    *path, last = name.split('__')
    part = config
    for key in path:
      part = part[key]
    part[last] = value
  return config


def open_workdir(workdir, fields, **request):
  """Opens a workdir as training does, but without a run; returns the notes for the user."""
  with workdir_lib.opened(workdir) as folder:
    if folder.begins(fields, workdir_lib.make_request(**request)):
      folder.clear()
      folder.begin(record.new(fields))
    else:
      folder.go_on(folder.changed_record(fields))
    return folder.notes


def fresh(config):
  """Returns the `build.Run` of a config (nested dicts), with nothing compiled yet."""
  return build.make_run(resolve(copy.deepcopy(config)))


def prepared(config):
  """Returns `fresh(config)`, shared by equal configs, so that programs compile once.

  Only the last few are kept, since compiled programs are large.
  """
  key = repr(config)
  prepared_run = _prepared.pop(key, None) or fresh(config)
  _prepared[key] = prepared_run  # moves it to the end, as the newest
  while len(_prepared) > 8:
    del _prepared[next(iter(_prepared))]
  return prepared_run


_prepared = {}


def initial_state(prepared_run):
  """Returns the train state of update 0, compiled once for equal networks and seeds."""
  experiment = prepared_run.experiment
  key = str([experiment.spec, *(experiment.fields[name] for name in (
      'loss', 'seed', 'network', 'policy', 'normalise', 'optimizer', 'total_steps'))])
  if key not in _initial:
    _initial[key] = prepared_run.initial_state()
  # Segments donate their state, so they get a copy.
  state = placement.replicate(_initial[key], prepared_run.place.mesh)
  return prepared_run.learner.allocate(state)


_initial = {}


def train_in(run, workdir, callbacks=(), ends=None, update=None):
  """Trains a Run in a workdir that has its config.json; returns whether it has finished.

  Args:
    run: the Run.
    workdir: the workdir.
    callbacks: see `sinks.users`.
    ends: the last update of each segment; None: the config decides.
    update: of the checkpoint to go on from; None: the newest whole one, if there is one.
  """
  update = checkpoints.newest_whole(workdir) if update is None else update
  opened = Opened(run, workdir, record.read(workdir), update, ends, ())
  return Training([opened], workdir, ()).train(stopping.Stopping(), sinks.users(callbacks))


def run(config, runner=loops.run, updates=None, tamper=lambda workers: workers, index=0,
        prepared_run=None):
  """Runs one segment from update 0.

  Args:
    config: a config as nested dicts; not used if `prepared_run` is given.
    runner: `loops.run` or `loops.run_serial`.
    updates: number of updates; checkpoint.every_updates if None.
    tamper: a function from workers to workers, as `tests.workers.wrap` returns.
    index: of the segment.
    prepared_run: a Run to use in place of `prepared(config)`.

  Returns:
    The receipts (batch, parameters) of all updates, the reports, and the last train state.
  """
  prepared_run = prepared_run or prepared(config)
  updates = updates or prepared_run.experiment.checkpoint.every_updates
  reports = []
  state = initial_state(prepared_run)
  snapshot = build.Snapshot(state, segment=index)
  with build.segment(prepared_run, snapshot, updates, reports.append) as segment:
    states = runner(tamper(segment.workers))
  receipts = []
  for report in reports:
    metrics = jax.device_get(report.metrics)
    receipts += [(as_hex(metrics['batch'][i]), as_hex(metrics['params'][i]))
                 for i in range(report.count)]
  return receipts, reports, states['learner'].train


def run_in_segments(config, segments, stop_at=None):
  """Returns (batch, parameters) of each update of a run in segments.

  Args:
    config: a config as nested dicts.
    segments: number of updates of each segment.
    stop_at: ends a segment after this many updates of the run.
  """
  prepared_run = prepared(config)
  state = initial_state(prepared_run)
  envs = None
  out = []

  def report(item):
    metrics = jax.device_get(item.metrics)
    out.extend((as_hex(metrics['batch'][i]), as_hex(metrics['params'][i]))
               for i in range(item.count))

  for index, updates in enumerate(segments):
    first = int(state.update)
    snapshot = build.Snapshot(state, envs, index)
    with build.segment(prepared_run, snapshot, updates, report,
                       lambda: len(out) == stop_at) as segment:
      states = loops.run(segment.workers)
      envs = build.envs_after(prepared_run, states, first)
    state = states['learner'].train
  return out


def on_mesh(function, size, in_specs, out_specs):
  """Compiles a function for a mesh of the first `size` devices, with the axis of learners."""
  mesh = Mesh(np.array(jax.devices()[:size]), (deterministic.AXIS,))
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
                               check_vma=False))
