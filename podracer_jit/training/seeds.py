"""Trains several seeds of an experiment at once: independent agents in one vmapped program.

Each seed has a workdir of its own, `seed1` and so on, with everything that a run has. This needs
environments that are JAX functions and a scheme that is one program, on one device. An operation
on all seeds may round differently from one on a single seed, so the last bits are not those of
single runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.actor import kept_envs, priorities
from podracer_jit.actor.rollouts import ActorState
from podracer_jit.errors import Diverged, EnvironmentFailed
from podracer_jit.experiment import build, checks, memory, trial
from podracer_jit.experiment.experiment import Experiment
from podracer_jit.experiment.resolve import resolve
from podracer_jit.learner import rollout_updates
from podracer_jit.numerics.fingerprints import canary
from podracer_jit.options import INT32_MAX
from podracer_jit.runtime import host
from podracer_jit.runtime.output import complain
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.training import life, session, stopping
from podracer_jit.training import train as train_lib
from podracer_jit.training.metrics import (
  Files,
  Meter,
  Record,
  Standstill,
  check_finite,
  environment_check,
  wall_clock,
)
from podracer_jit.training.progress import Progress
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoint, history, workdirs

MAX_SEEDS = 4096
# Files that are open for each seed while it trains: its lock, metrics and receipts; and with
# TensorBoard its events and two ends of a queue.
FILES_OF_SEED = 3
FILES_OF_EVENTS = 3
_OTHER_FILES = 100  # of the process, with those that are open only during a save


class Seeds(NamedTuple):
  """The runs of all seeds, whose workdirs this process has opened."""

  sessions: Sequence[session.Session]
  notes: Sequence[str]  # lines about memory, repairs and changes

  @property
  def workdir(self) -> Path:
    """The workdir of the last seed, which is saved last."""
    return self.sessions[-1].workdir

  def train(self, stop: stopping.Stopping, profile_dir: str | None = None, quiet: bool = False,
            began_s: float | None = None) -> bool:
    """Trains all seeds segment by segment until each has total_steps.

    Args:
      stop: handles signals.
      profile_dir: a folder for a trace of a few calls; None: no trace.
      quiet: prints nothing but warnings.
      began_s: when the command began, by `time.perf_counter`; None: now.

    Returns:
      True if all seeds have total_steps, False if a signal stopped them.

    Raises:
      checkpoint.NotSaved: a file cannot be written.
      Diverged: a loss or a gradient of a seed is not finite.
    """
    with checkpoint.naming_last_good(self.workdir):
      return _train(self.sessions, stop, profile_dir, quiet,
                    time.perf_counter() if began_s is None else began_s)


@contextlib.contextmanager
def opened(config: Mapping[str, Any], num_seeds: int, workdir: Path, options: life.Life
           ) -> Iterator[Seeds]:
  """Builds the runs of all seeds and opens their workdirs; closes these on the way out.

  Args:
    config: of the first seed; the others have the seeds that follow.
    num_seeds: number of seeds.
    workdir: the folder of their workdirs.
    options: where each begins, and what may differ if it goes on.

  Yields:
    The runs, ready to train.

  Raises:
    ValueError: the experiment cannot be trained so, or a workdir is not that of its seed.
    OSError: a workdir cannot be written to.
  """
  first = resolve(config)
  for problem in _problems(first, num_seeds, options):
    raise ValueError(problem)
  _allow_open_files(num_seeds, first.log.tensorboard)
  host.prepare_host(first.placement)
  run = build.make_run(first)
  trial.check(run)
  notes = [*(f'warning: {line}' for line in memory.check(run, num_seeds)), *checks.notes(first)]
  sessions = []
  with contextlib.ExitStack() as stack:
    for seed in range(first.seed, first.seed + num_seeds):
      # Nothing but the experiment depends on the seed, so the seeds share what is compiled.
      run_of_seed = dataclasses.replace(run, experiment=dataclasses.replace(
          first, seed=seed, fields={**first.fields, 'seed': seed}))
      sessions.append(stack.enter_context(session.opened_run(
          run_of_seed, workdir / f'seed{seed}', options)))
      _check_session(sessions[-1], seed)
      notes += [f'seed {seed}: {note}' for note in sessions[-1].notes]
    yield Seeds(sessions, notes)


def _problems(experiment: Experiment, num_seeds: int, options: life.Life) -> Iterator[str]:
  """Yields why the experiment cannot be trained with several seeds at once."""
  if not 1 <= num_seeds <= MAX_SEEDS:
    yield f'--num_seeds: must be from 1 to {MAX_SEEDS}, got {num_seeds}'
  if experiment.seed + num_seeds - 1 > INT32_MAX:
    yield (f'--num_seeds: the last seed would be {experiment.seed + num_seeds - 1}; must be at '
           f'most {INT32_MAX}')
  if not experiment.spec.is_function:
    yield (f'--num_seeds: wants environments that are JAX functions; {experiment.env.task} is '
           'none, so train its seeds one after the other')
  if not experiment.scheme.graph.one_program:
    names = [name for name, scheme in SCHEMES.items() if scheme.graph.one_program]
    yield (f'--num_seeds: wants a scheme that is one program, scheme = {" or ".join(names)}; got '
           f'{experiment.scheme_name}')
  if experiment.placement.learner_devices != experiment.placement.actor_devices or len(
      experiment.placement.learner_devices) > 1:
    yield '--num_seeds: wants one device; placement.learner_devices has several'
  if experiment.placement.cluster != 'none':
    yield f'placement.cluster: must be none with --num_seeds, got {experiment.placement.cluster}'
  if experiment.eval.every_updates:
    yield ('eval.every_updates: must be 0 with --num_seeds; evaluate the workdir of a seed '
           'afterwards')
  if options.repeat:
    yield '--repeat: a run of one seed can be repeated, not --num_seeds'


def _allow_open_files(num_seeds: int, tensorboard: bool) -> None:
  """Raises this process's limit of open files, if so many seeds need more.

  Args:
    num_seeds: number of seeds.
    tensorboard: whether they write events.

  Raises:
    ValueError: the limit cannot be so high.
  """
  needed = _OTHER_FILES + num_seeds * (FILES_OF_SEED + (FILES_OF_EVENTS if tensorboard else 0))
  limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
  if needed <= limit or limit == resource.RLIM_INFINITY:
    return
  if highest != resource.RLIM_INFINITY and needed > highest:
    raise ValueError(f'--num_seeds: {num_seeds} seeds need {needed:,} open files, and this process '
                     f'may have {highest:,} (ulimit -n); raise that limit, or train fewer at once')
  resource.setrlimit(resource.RLIMIT_NOFILE, (needed, highest))


def _check_session(opened_session: session.Session, seed: int) -> None:
  """Checks that a seed goes on with one config.

  Raises:
    ValueError: updates from before a change of the config must be made again.
  """
  stages = list(life.stages(opened_session.run, opened_session.entries, opened_session.update or 0))
  if len(stages) > 1:
    raise ValueError(f'--num_seeds: updates from before a change of the config are lost in '
                     f'{opened_session.workdir}; go on there first, with seed {seed} alone')


class _Seed:
  """One seed in training: its files, checkpoints and metrics."""

  def __init__(self, opened_session: session.Session, stack: contextlib.ExitStack, note: Any,
               began_s: float):
    """Restores the newest checkpoint or begins anew.

    Args:
      opened_session: the run and its workdir.
      stack: closes files, checkpoints and environments.
      note: called with lines to print.
      began_s: see `Seeds.train`.
    """
    self.run = opened_session.run
    self.workdir = opened_session.workdir
    self.seed = self.run.experiment.seed
    self._entries = opened_session.entries
    self._saved = stack.enter_context(contextlib.closing(
        checkpoint.Checkpoints(self.workdir, self.run.experiment.checkpoint.keep)))
    self._meta: Mapping[str, Any] = {'segment': 0}
    state = self.run.initial_state()
    envs: Any | None = None
    if opened_session.update is not None:
      like = state._replace(replay=self.run.learner.replay_shapes())
      state, self._meta = train_lib.restore(
          self.run, self._saved, self.workdir, like, opened_session.update, self._entries, note)
      envs = self._saved.restore_envs(build.kept_env_shapes(self.run), int(state.update))
      if envs is not None and not jax.tree.leaves(state.replay):
        envs = priorities.forget(envs)
    self._wall_s = wall_clock(self._meta, began_s)
    self._standstill = Standstill()
    self.update = int(state.update)
    self.steps = int(state.steps)
    # The first states, until `_stacked` has copied them.
    self.state: TrainState | None = state
    self.actor, = build.make_actors(self.run, self._meta['segment'], stack, envs)
    self.finished = self.steps >= self.run.experiment.total_steps
    if not self.finished:
      self._files = stack.enter_context(contextlib.closing(Files(
          self.workdir, self.update, self.steps, self.run.experiment.log.tensorboard)))
      for problem in self._files.problems:
        note(f'seed {self.seed}: {problem}')

  def begin_segment(self, num_seeds: int) -> None:
    """Writes the header of a segment to the receipts."""
    experiment = self.run.experiment
    entry = next((entry for entry in self._entries if entry.first_update == self.update + 1), None)
    noted = {history.KEY: entry.as_json()} if entry else {}
    self._files.begin_segment(dict(
        segment=self._meta['segment'], first_update=self.update + 1, versions=workdirs.versions(),
        canary=canary(), num_seeds=num_seeds, **noted))
    self._meter = Meter(experiment.log.window, experiment.spec.frame_skip,
                        lambda: Waits(0.0, 0.0), self._meta, wall_s=self._wall_s)
    self._check = environment_check(self.run, self._meta['segment'])

  def write(self, report: Report) -> Record | None:
    """Writes the updates of a call; returns the last record, None if the seed has finished.

    Raises:
      checkpoint.NotSaved: metrics or receipts cannot be written.
      Diverged: a loss, a gradient or the train state is not finite.
      EnvironmentFailed: an environment has returned a value that cannot be learned from.
    """
    record = None
    if not report.count:
      return None
    try:
      self._check(report)
      for record, receipt in self._meter.records(report):
        warning = self._standstill.notice(record, receipt)
        if warning:
          complain(f'podracer_jit: warning: seed {self.seed}, update {record["update"]:,}: '
                   f'{warning}')
        self._files.write(record, receipt)
        check_finite(record)
    except (Diverged, EnvironmentFailed) as error:
      raise type(error)(f'seed {self.seed}, {error}; '
                        f'{checkpoint.last_good(self.workdir)}') from None
    return record

  def save(self, state: TrainState, actor_state: ActorState) -> None:
    """Saves a checkpoint at the end of a segment.

    Args:
      state: of this seed.
      actor_state: of this seed.

    Raises:
      checkpoint.NotSaved: it cannot be written.
    """
    experiment = self.run.experiment
    if not experiment.checkpoint.replay:
      state = state._replace(replay=None)
    newest = history.newest_config(experiment.fields, self._entries, self.update + 1)
    self._meta = self._meter.meta() | {'segment': self._meta['segment'] + 1}
    self._files.flush()
    envs = kept_envs.gather([actor_state]) if self.run.experiment.keeps_envs else None
    self._saved.save(state, self._meta | {'run': workdirs.record_of(newest, self._entries)}, envs)
    self.update = int(state.update)
    self.steps = int(state.steps)
    self.finished = self.steps >= experiment.total_steps


def _train(sessions: Sequence[session.Session], stop: stopping.Stopping,
           profile_dir: str | None, quiet: bool, began_s: float) -> bool:
  """Trains all seeds; see `Seeds.train`."""
  experiment = sessions[0].run.experiment
  seeds = f'{len(sessions)} seeds'
  folder = sessions[0].workdir.parent
  title = f'{experiment.env.task}  {experiment.scheme_name} {experiment.loss_name}  {folder}'
  with contextlib.ExitStack() as stack:
    progress = stack.enter_context(Progress(experiment, f'{title}  means of {seeds}', quiet=quiet))
    runs = [_Seed(each, stack, progress.note, began_s) for each in sessions]
    going_on = sum(each.update > 0 for each in runs)
    how = f'of which {going_on} go on' if going_on else 'starting'
    progress.note(f'{title}: {seeds}, {how}')
    if not all(each.finished for each in runs):
      progress.compiling()
    states, actor_states = _stacked(runs)
    program = _program(runs[0])
    profiler = stack.enter_context(contextlib.closing(train_lib.Profiler(profile_dir)))

    def write(counts: jax.Array, metrics: Mapping[str, Any]) -> bool:
      profiler.reported()
      return _write(runs, counts, metrics, progress)

    while not all(each.finished for each in runs) and not stop.asked():
      states, actor_states = _segment(runs, program, states, actor_states, write, stop)
    finished = all(each.finished for each in runs)
    steps = min(each.steps for each in runs)
    hint = '' if finished else '; the same command goes on'
    names = f'{runs[0].workdir.name} to {runs[-1].workdir.name}'
    progress.finish(f'{"finished" if finished else "stopped"} at {steps:,} steps of each seed; '
                    f'{folder} has them all, {names}{hint}')
  return finished


def _stacked(runs: Sequence[_Seed]) -> tuple[TrainState, ActorState]:
  """Returns the train states and the actors' states of all seeds with a leading axis of seeds."""
  # A learner with a replay allocates it here. A seed's own copy is dropped.
  states = []
  actor_states = []
  for each in runs:
    state = each.run.learner.allocate(each.state)
    each.state = None
    states.append(jax.tree.map(lambda x: x.addressable_data(0), state))
    actor_states.append(each.actor.state)

  def stack(*leaves: jax.Array) -> jax.Array:
    # Python numbers in an environment's state have weak types, which the program does not return.
    # Without the dtype, its second call would compile it again.
    return jnp.stack(leaves, dtype=leaves[0].dtype)

  return jax.tree.map(stack, *states), jax.tree.map(stack, *actor_states)


def _program(first: _Seed):
  """Returns the compiled program that makes some updates of all seeds.

  Args:
    first: any of the seeds; the functions are those of all.

  Returns:
    program(states, actor_states, limit, total_steps), as of `rollout_updates.make_fused` with a
    leading axis of seeds. A seed that has `total_steps` makes no update.
  """
  run = first.run
  rollout = run.acting.rollout(first.actor.rollout_program.vector_envs)
  fused = rollout_updates.make_fused(rollout, run.learner.learn, _updates_per_call(run.experiment))
  return jax.jit(jax.vmap(fused, in_axes=(0, 0, None, None)), donate_argnums=(0, 1))


def _updates_per_call(experiment: Experiment) -> int:
  return min(experiment.placement.updates_per_call, experiment.checkpoint.every_updates)


def _segment(runs: Sequence[_Seed], program: Any, states: TrainState, actor_states: ActorState,
             write: Callable[[jax.Array, Mapping[str, Any]], bool], stop: stopping.Stopping
             ) -> tuple[TrainState, ActorState]:
  """Runs a segment of all seeds and saves them.

  Args:
    runs: of all seeds.
    program: of `_program`.
    states: of all seeds; donated.
    actor_states: of all seeds; donated.
    write: writes the counts and metrics of a call; returns False if no seed has made an update.
    stop: says whether a signal has asked for an end.

  Returns:
    The states and the actors' states after the segment.
  """
  experiment = runs[0].run.experiment
  calls = _updates_per_call(experiment)
  training = [each for each in runs if not each.finished]
  for each in training:
    each.begin_segment(len(runs))
  updates = 0
  previous = None
  while updates < experiment.checkpoint.every_updates and not stop.asked():
    limit = min(calls, experiment.checkpoint.every_updates - updates)
    states, actor_states, counts, metrics = program(states, actor_states, limit,
                                                    experiment.total_steps)
    updates += limit
    # The files of a call are written while the device makes the next one.
    if previous and not write(*previous):
      previous = None
      break
    previous = counts, metrics
  if previous:
    write(*previous)
  with stop.saving():
    for i, each in enumerate(runs):
      if each in training:
        each.save(*jax.tree.map(lambda x, i=i: x[i], (states, actor_states)))
  if not experiment.checkpoint.replay:
    # As in a run that resumes: the replay is empty when a segment begins.
    states = _with_empty_replays(runs, states)
    actor_states = actor_states._replace(envs=tuple(map(priorities.forget, actor_states.envs)))
  return states, actor_states


def _with_empty_replays(runs: Sequence[_Seed], states: TrainState) -> TrainState:
  """Returns the states with a new replay in place of the old one, if there is one."""
  single = jax.tree.map(lambda x: x[0], states._replace(replay=None))
  replay = runs[0].run.learner.allocate(single).replay
  if not jax.tree.leaves(replay):
    return states
  return states._replace(replay=jax.tree.map(
      lambda x: jnp.stack([x.addressable_data(0)] * len(runs)), replay))


def _write(runs: Sequence[_Seed], counts: jax.Array, metrics: Mapping[str, Any],
           progress: Progress) -> bool:
  """Writes the metrics of a call and shows their means.

  Args:
    runs: of all seeds.
    counts: [S], updates of each seed.
    metrics: [S, updates, ...].
    progress: shows the means of all seeds.

  Returns:
    False if no seed has made an update.
  """
  counts = np.asarray(counts)
  metrics = jax.tree.map(np.asarray, metrics)
  records = []
  for i, each in enumerate(runs):
    count = int(counts[i])
    cgd = (each.run.learner.mean_cgd(0),) * count
    report = Report(jax.tree.map(lambda x, i=i: x[i], metrics), count, cgd, (0.0,) * count)
    records.append(each.write(report))
  shown_records = [record for record in records if record]
  if shown_records:
    progress.show(_means(shown_records))
  return bool(shown_records)


def _means(records: Sequence[Record]) -> Record:
  """Returns a record of the means of all seeds, of what each of them has."""
  means = {}
  for name, value in records[0].items():
    if name == 'warning':
      continue
    values = [record[name] for record in records if record[name] is not None]
    mean = np.mean(values) if values else None
    means[name] = int(mean) if isinstance(value, int) else mean
  warnings = [record['warning'] for record in records if 'warning' in record]
  if warnings:
    means['warning'] = f'{len(warnings)} of {len(records)} seeds, such as: {warnings[0]}'
  return means
