"""Short real runs in this process, for tests of whole schemes."""

import contextlib
import copy
import dataclasses
import os

import jax
import numpy as np
from jax.sharding import Mesh

from podracer_jit import experiment, loops
from podracer_jit.actor import kept_envs
from podracer_jit.agents import networks
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve
from podracer_jit.numerics import deterministic
from podracer_jit.numerics.fingerprints import as_hex
from podracer_jit.runtime import placement
from podracer_jit.training import opening, sinks, stopping
from podracer_jit.training.opening import Opened
from podracer_jit.training.trainer import Training
from podracer_jit.workdir import actions, checkpoints, journal, record
from podracer_jit.workdir import workdir as workdir_lib
from tests.flags import COMPILED_SOON

# The environment of processes that run for seconds; they cache more compiled programs than usual.
QUICK = os.environ | {'XLA_FLAGS': COMPILED_SOON,
                      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
# Fields of a record that depend on the process and its time.
TIMES = ('sps', 'elapsed_s', 'wall_s', 'actor_wait_s', 'learner_wait_s', 'eval_wait_s',
         'samples_per_s', 'memory_mb')


def small(loss='impala', task='CartPole-v1', network='mlp', **fields):
  """Returns a config of a few small updates."""
  config = experiment.config(loss, network, 'adam', unroll_length=8, num_minibatches=2,
                             scheme='sync', **fields).to_dict()
  config['env'] |= {'task': task, 'num_envs': 8, 'renew_every_updates': 6}
  config['checkpoint'] |= {'every_updates': 6, 'every_seconds': 0.0}
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


def train_in(run, workdir, callbacks=(), update=None):
  """Trains a Run in a workdir that has its config.json; returns whether it has finished.

  Args:
    run: the Run.
    workdir: the workdir.
    callbacks: see `sinks.users`.
    update: of the checkpoint to go on from; None: the newest whole one, if there is one.
  """
  update = checkpoints.newest_whole(workdir) if update is None else update
  opened = Opened(run, workdir, record.read(workdir), update, ())
  return Training([opened], workdir, ()).train(stopping.Stopping(), sinks.users(callbacks))


class StopAt(sinks.Sink):
  """Stops a run when a checkpoint was saved."""

  def __init__(self, update):
    self._update = update

  def saved(self, at):
    return sinks.STOP if at.update == self._update else None


def train(run, workdir, stop=None, callbacks=(), **request):
  """Trains a Run in a workdir as the command does; returns whether it has finished.

  Args:
    run: the Run.
    workdir: the workdir, new or used.
    stop: after this update the run is saved and stopped; None: only the config decides.
    callbacks: see `sinks.users`.
    **request: of `make_request`.
  """
  if stop:
    experiment = run.experiment
    options = dataclasses.replace(experiment.checkpoint, every_updates=stop)
    run = dataclasses.replace(run, experiment=dataclasses.replace(experiment, checkpoint=options))
    callbacks = [*callbacks, StopAt(stop)]
  with opened(run, workdir, **request) as training:
    return training.train(stopping.Stopping(), sinks.users(callbacks), quiet=True)


@contextlib.contextmanager
def opened(run, workdir, **request):
  """Opens the workdir of a Run; yields the `Training`, with the notes for the user."""
  with opening.opened_run(run, workdir, workdir_lib.make_request(**request)) as opened_run:
    yield Training([opened_run], workdir, opened_run.notes)


def contents(workdir):
  """Returns what a run has: receipts, metrics without times, its newest checkpoint, and actions.

  There are only actions of segments that have a checkpoint.
  """
  metrics = [{name: value for name, value in line.items() if name not in TIMES}
             for line in journal.read_lines(workdir / journal.METRICS)]
  receipts = journal.read_receipts(workdir)
  assert not receipts.problems
  *_, newest = checkpoints.saved_updates(workdir)
  segments = segments_of(workdir)
  sent = actions_of(workdir)
  assert sent.keys() <= set(segments.values())
  state = checkpoints.read_manifest(checkpoints.path_of(workdir, newest))['state_sha256']
  return receipts.by_update, metrics, newest, state, sent.get(segments[newest])


def segments_of(workdir):
  """Returns the index of each checkpoint's segment by update."""
  return {update: checkpoints.segment_of(checkpoints.read_meta(workdir, update), update)[0]
          for update in checkpoints.saved_updates(workdir)}


def actions_of(workdir):
  """Returns the actions that a workdir holds, in bytes, by the index of their segment."""
  folder = workdir / actions.FOLDER
  return {int(path.name): path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def run(config, runner=loops.run, updates=None, tamper=lambda workers: workers, index=0,
        prepared_run=None):
  """Runs one segment from update 0.

  Args:
    config: a config as nested dicts; not used if `prepared_run` is given.
    runner: `loops.run` or `loops.run_serial`.
    updates: number of updates; those of a segment if None.
    tamper: a function from workers to workers, as `tests.workers.wrap` returns.
    index: of the segment.
    prepared_run: a Run to use in place of `prepared(config)`.

  Returns:
    The receipts (batch, parameters) of all updates, the reports, and the last train state.
  """
  prepared_run = prepared_run or prepared(config)
  updates = updates or prepared_run.experiment.env.renew_every_updates
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


def run_in_segments(config, segments):
  """Returns (batch, parameters) of each update of a run in segments.

  Args:
    config: a config as nested dicts.
    segments: number of updates of each segment.
  """
  prepared_run = prepared(config)
  snapshot = build.Snapshot(initial_state(prepared_run))
  out = []
  positions = []

  def report(item):
    metrics = jax.device_get(item.metrics)
    out.extend((as_hex(metrics['batch'][i]), as_hex(metrics['params'][i]))
               for i in range(item.count))

  def after(position, wait_written):
    positions.append(position)
    return False

  for index, updates in enumerate(segments):
    with build.segment(prepared_run, snapshot, updates, report,
                       build.Events(after=after)) as segment:
      loops.run(segment.workers)
    position = positions[-1]
    envs = None
    if prepared_run.experiment.keeps_envs:
      envs = kept_envs.gather(position.actors())
    snapshot = build.Snapshot(position.state, envs, index + 1)
  return out


def on_mesh(function, size, in_specs, out_specs):
  """Compiles a function for a mesh of the first `size` devices, with the axis of learners."""
  mesh = Mesh(np.array(jax.devices()[:size]), (deterministic.AXIS,))
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs,
                               check_vma=False))
