"""Trains a config with several tasks, seeds and values of its fields, each run in its own workdir.

  podracer_jit sweep --config=ppo_cartpole --seeds=1:3 --out=runs/s
  podracer_jit sweep --config=ppo_mujoco --tasks=HalfCheetah-v4,Hopper-v4 --seeds=1:3 \\
      --grid='optimizer.learning_rate=1e-3,3e-4' --jobs=2 --out=runs/s
  podracer_jit sweep --config=ppo_cartpole --search=tpe:32 --prune=asha \\
      --grid='optimizer.learning_rate=log(1e-4,1e-2)' --config.eval.every_updates=50 --out=runs/t

Each member of the product is a run in OUT/NAME. --config and --grid may be repeated; all values
multiply. Other flags --config.FIELD=VALUE are for all members. The same command goes on with what
was stopped; a larger grid adds members. All members are checked before the first one begins. Where
tasks are JAX functions and the scheme is one program, seeds that follow each other are trained in
one program (--num_seeds).

--tasks=@atari5 names a list: @atari57, @atari5, @nappo6, @mujoco9, @dmc15 or @minatar.

--jobs limits how many are trained at once. --ray trains them on the cluster at RAY_ADDRESS, --slurm
submits them as an array (--slurm='--partition=cpu --cpus-per-task=4'); all machines must see OUT.
The command with --slurm ends at once with exit code 3; the same command later tells what has
finished, and submits again what was lost.

With --search, values may be ranges: log(1e-4,1e-2), uniform(0,1) and int(1,8), of which Optuna
chooses so many (tpe:32, random:32). They are ranked by their newest evaluations; --prune=asha stops
members that are behind. This needs the extra `search`.

Exit code: 0 if all members have finished; 1 if a member has failed, which runs again only with
--retry; 2 if nothing was started; 3 if a signal has stopped the members, which have saved;
130 if a second signal, or one during the checks, has ended the command.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from podracer_jit.cli import arguments, verb
from podracer_jit.cluster import set_ray_environment
from podracer_jit.errors import FAILED, FINISHED, STOPPED, InUse, Refused, refusing
from podracer_jit.options import from_json
from podracer_jit.parts import user_path
from podracer_jit.runtime import children
from podracer_jit.runtime.output import complain, say
from podracer_jit.sweep import fitting, local, members, search, slurm
from podracer_jit.sweep.fitting import Checked, Size
from podracer_jit.sweep.folder import CONFIG, NAME, Folder
from podracer_jit.sweep.local import Local
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board, State
from podracer_jit.sweep.search import Search
from podracer_jit.sweep.training import Jobs, Listed, Plan, train, wait_until_saved
from podracer_jit.training import stopping
from podracer_jit.workdir import files, lock


class _Prepared(NamedTuple):
  """A sweep that may begin."""

  plan: Plan
  members: Sequence[Member]  # that are known by now
  sizes: Mapping[str, Size]  # by the members' names
  todo: Sequence[Size]  # of the members that will be trained


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = _flags()
  shared = [arg for arg in argv[1:] if arg.startswith('--config.')]
  if not arguments.read_flags([arg for arg in argv if arg not in shared], values, __doc__,
                              ['config', 'out']):
    return FINISHED
  with stopping.handled() as stop, contextlib.ExitStack() as stack:
    with refusing(OSError):
      out = user_path(values.out)
      _check_out(out)
      if not values.dry:
        stack.enter_context(_opened(out))
      folder = Folder(out, importlib.metadata.version('podracer_jit'),
                      values.dry)
      _check_places(values)
      array = slurm.Array(folder, values.slurm) if values.slurm is not None else None
      if array:
        array.collect(folder.members)
      prepared = _searched(folder, values, shared) if values.search else (
          _listed(folder, values, shared))
      if values.dry:
        for member in prepared.members:
          if not folder.has_ended(member):
            say(shlex.join(member.command(out)))
        return FINISHED
      folder.began(['podracer_jit', 'sweep', *argv[1:]])
      if array:
        code = _submitted(array, folder, prepared.members, values.jobs)
        folder.write()
        return code
      jobs = stack.enter_context(_jobs(out, values, prepared))
      folder.write()
      wait_until_saved(out, [member for member in prepared.members
                             if not folder.has_ended(member)])
    stop.begin_training()
    board = stack.enter_context(contextlib.closing(Board(out, prepared.sizes)))
    count = len(prepared.members)
    board.say(f'{out}: {count} members, {jobs.room} at once' if count > 1 else f'{out}: 1 member')
    for member in prepared.members:
      if folder.is_finished(member):
        board.tell(member, State.FINISHED)
      elif member.name in folder.errors:
        board.tell(member, State.FAILED, folder.errors[member.name])
      elif folder.is_pruned(member):
        board.tell(member, State.PRUNED)
      else:
        board.tell(member, State.WAITING)
    code = train(folder, prepared.plan, jobs, stop, board)
  if isinstance(prepared.plan, Search):
    _tell_best(prepared.plan)
    return _ended(folder, folder.members, code)
  return _ended(folder, prepared.members, code)


def _listed(folder: Folder, values: flags.FlagValues, shared: Sequence[str]) -> _Prepared:
  """Returns the sweep of all values that the flags name.

  Args:
    folder: of the sweep; receives its members.
    values: the flags.
    shared: flags of the config, of all members.

  Raises:
    ValueError: a flag or a config is wrong, or the members do not fit.
  """
  grid = [members.values_of(flag) for flag in values.grid]
  for name, choices in grid:
    if any(search.range_of(value) for value in choices):
      raise ValueError(f'--grid: {name} has a range; add --search=tpe:32, or list its values')
  if values.prune:
    raise ValueError('--prune: is for --search')
  checked = _checked(folder, _members(values, shared, grid))
  folder.add(checked.members, checked.configs)
  todo = [member for member in checked.members if not folder.is_finished(member)]
  folder.retry([member for member in todo if values.retry or folder.is_pruned(member)])
  todo = [member for member in todo if not folder.has_ended(member)]
  if not values.dry:
    fitting.check_disk(folder.path, [checked.sizes[member.name] for member in todo
                                     if not (folder.path / member.name).exists()])
  return _Prepared(Listed(todo), checked.members, checked.sizes,
                   [checked.sizes[member.name] for member in todo])


def _searched(folder: Folder, values: flags.FlagValues, shared: Sequence[str]) -> _Prepared:
  """Returns the sweep whose values Optuna chooses; see `_listed`."""
  seeds = members.seeds_of(values.seeds)
  settings = search.settings_of(values.search, values.prune, seeds[0], values.retry)
  ranges = search.ranges_of([members.values_of(flag) for flag in values.grid])
  if not ranges or len(values.config) > 1:
    raise ValueError('--search: wants one --config, and a range or values in --grid')

  def members_of(fields: Mapping[str, Any]) -> list[Member]:
    return _members(values, shared, [(name, [value]) for name, value in fields.items()])

  examples = search.examples(ranges)
  if values.prune and len(members_of(examples[0])) > 1:
    raise ValueError('--prune: wants one seed and one task, so that a trial is one run')
  # Values in between are as good as the ends.
  wanted = [member for fields in examples for member in members_of(fields)]
  members.check_names(wanted)
  checked = _checked(folder, wanted)
  if not checked.evaluates:
    raise ValueError('--search: ranks members by evaluations, and there are none; set '
                     '--config.eval.every_updates, such as 100')
  if values.dry:
    raise ValueError('--dry: a search chooses its members one after the other')
  folder.add([], checked.configs)
  if values.retry:
    folder.retry([member for member in folder.members if member.name in folder.errors])
  size = max(checked.sizes.values(), key=lambda size: size.memory)
  config, = checked.configs.values()
  own = {name: functools.reduce(lambda tree, key: tree.get(key, {}), name.split('.'),
                                from_json(config)) for name in ranges}
  plan = search.Search(folder, settings, ranges, members_of, own)
  sizes = collections.defaultdict(lambda: size)
  # Of a trial that has failed, some members may never begin.
  known = [member for member in folder.members
           if folder.has_ended(member) or plan.is_waiting(member)]
  most = [size] * (settings.trials * len(members_of(examples[0])))
  begun = sum((folder.path / member.name).exists() for member in folder.members)
  fitting.check_disk(folder.path, most[begun:])
  return _Prepared(plan, known, sizes, most)


def _members(values: flags.FlagValues, shared: Sequence[str],
             grid: Sequence[tuple[str, Sequence[Any]]]) -> list[Member]:
  """Returns the members of some values, each with one seed.

  Args:
    values: the flags.
    shared: flags of the config, of all members.
    grid: fields and values.

  Raises:
    ValueError: a flag is wrong.
  """
  for arg in shared:
    if '=' not in arg:
      raise ValueError(f'{arg}: has no value; write {arg}=VALUE')
  return members.product(values.config, members.tasks_of(values.tasks),
                         members.seeds_of(values.seeds), grid, shared)


def _check_out(out: Path) -> None:
  """Checks that a path may be the folder of a sweep.

  Raises:
    ValueError: it is a file, or the workdir of a run.
  """
  existing = next(path for path in (out, *out.parents) if path.exists())
  if not existing.is_dir():
    raise ValueError(f'--out: {existing} is a file; name a folder')
  if (out / CONFIG).exists() and not (out / NAME).exists():
    raise ValueError(f'--out: {out} is the workdir of a run; name another folder')


def _check_places(values: flags.FlagValues) -> None:
  """Checks that the flags name one place for the members.

  Raises:
    ValueError: they name two, or the search is not for it.
  """
  if values.ray and values.slurm is not None:
    raise ValueError('--slurm: cannot be combined with --ray')
  if values.slurm is not None and values.search:
    raise ValueError('--slurm: cannot be combined with --search, which chooses a member after '
                     'others have ended; on a cluster of Ray it can')


@contextlib.contextmanager
def _jobs(out: Path, values: flags.FlagValues, prepared: _Prepared) -> Iterator[Jobs]:
  """Yields the processes of members: on this machine, or on a cluster.

  Raises:
    ValueError: so many do not fit, or there is no cluster.
  """
  if not values.ray:
    count = fitting.jobs_that_fit(values.jobs, len(local.slots(values.jobs)), prepared.todo)
    yield Local(out, local.slots(count))
    return
  if importlib.util.find_spec('ray') is None:
    raise ValueError(f'--ray: Ray is not installed: {sys.executable} -m pip install ray')
  set_ray_environment()
  from podracer_jit.cluster import commands  # Ray takes a second to load
  from podracer_jit.sweep.ray import OnRay
  with commands.connected() as cpus:
    if not (values.jobs or cpus):
      raise ValueError('--ray: the cluster has no CPUs; add a machine, or set --jobs to wait for '
                       'machines that will come')
    yield OnRay(out, values.jobs or cpus, prepared.sizes)


def _submitted(array: slurm.Array, folder: Folder, asked: Sequence[Member], at_once: int | None
               ) -> int:
  """Submits the members that are neither finished nor under way; returns the exit code.

  Raises:
    Refused: SLURM does not take them.
  """
  under_way = array.under_way()
  # A member writes its exit code before its task ends, so this has those that ended meanwhile.
  array.collect(folder.members)
  todo = [member for member in asked if not folder.is_finished(member)
          and member.name not in folder.errors and member.name not in under_way]
  finished = sum(map(folder.is_finished, asked))
  busy = sum(member.name in under_way for member in asked)
  say(f'{folder.path}: {len(asked)} members, {finished} finished, {busy} under way')
  if todo:
    say(f'submitted {len(todo)} as job {array.submit(todo, at_once)}')
  return _ended(folder, asked, STOPPED if todo or busy else FINISHED)


def _tell_best(plan: Search) -> None:
  """Prints the best trial of a search, beside the config's own values."""
  best, own = plan.best()
  if best is None:
    say('no trial has finished yet')
    return
  fields = shlex.join(f'--config.{name}={value}' for name, value in best.fields.items())
  say(f'best: return {best.value:.2f} with {fields}')
  if own is not None:
    say("the config's own values are the best" if own == best else
        f"the config's own values: return {own.value:.2f}")


def _flags() -> flags.FlagValues:
  """Defines the command's flags."""
  values = flags.FlagValues()
  text = dict(flag_values=values)
  flags.DEFINE_multi_string('config', [], 'A config, as for training; repeat it for several.',
                            **text)
  flags.DEFINE_list('tasks', [], 'Tasks by comma, or the name of a list, such as @atari5. Default: '
                    "the config's own.", **text)
  flags.DEFINE_string('seeds', '1', 'Seeds: 1:3 means 1, 2 and 3; 1,5 means 1 and 5.', **text)
  flags.DEFINE_multi_string('grid', [], 'A field and its values by comma: '
                            'optimizer.learning_rate=1e-3,3e-4. Repeated, the values multiply.',
                            **text)
  flags.DEFINE_integer('jobs', None, 'Members to train at once. Default: one for each core, or for '
                       'each GPU, as far as the memory allows.', lower_bound=1, **text)
  flags.DEFINE_string('out', None, 'The folder of the sweep.', **text)
  flags.DEFINE_bool('ray', False, 'Train the members on the Ray cluster at RAY_ADDRESS.', **text)
  flags.DEFINE_string('slurm', None, 'Train the members as an array of SLURM, with these options '
                      'of sbatch.', **text)
  flags.DEFINE_string('search', None, 'tpe:N or random:N: Optuna chooses values in the ranges of '
                      '--grid for N trials.', **text)
  flags.DEFINE_string('prune', None, 'asha: a search stops members that are behind.', **text)
  flags.DEFINE_bool('dry', False, 'Only print the commands of the members that would be trained.',
                    **text)
  flags.DEFINE_bool('retry', False, 'Train members again that have failed.', **text)
  return values


@contextlib.contextmanager
def _opened(out: Path) -> Iterator[None]:
  """Makes the folder of the sweep and locks it during the block; removes it if it stays empty.

  Raises:
    Refused: another sweep has it.
    OSError: it cannot be made.
  """
  new = [folder for folder in (out, *out.parents) if not folder.exists()]
  files.make_folder(out)
  try:
    with contextlib.closing(lock.WorkdirLock(out)):
      yield
  except InUse as error:
    raise Refused(str(error).replace('--workdir', '--out')) from None
  finally:
    for folder in new:
      files.remove_if_empty(folder)


def _checked(folder: Folder, wanted: Sequence[Member]) -> Checked:
  """Returns the members of the sweep that train what is wanted, checked in another process.

  Raises:
    ValueError: a config is wrong.
  """
  known = {member.name for member in folder.members}
  # Their flags are those of this command, which must be the same experiment.
  covering = [member._replace(flags=wanted[0].flags) for member in folder.covering(wanted)]
  alone = folder.not_covered(wanted)
  groups = [[member] for member in covering + [each for each in alone if each.name in known]]
  groups += members.same_but_seeds([each for each in alone if each.name not in known])
  # JAX would take memory here as long as the sweep lasts, and its threads do not survive a fork.
  with concurrent.futures.ProcessPoolExecutor(
      1, mp_context=multiprocessing.get_context('spawn'),
      initializer=children.end_with_parent, initargs=(os.getpid(),)) as pool:
    try:
      return pool.submit(_check, groups, folder.configs).result()
    except concurrent.futures.process.BrokenProcessPool:
      raise ValueError('the check of the members was killed; is the memory full?') from None


def _check(groups: Sequence[Sequence[Member]], configs: dict[str, Any]) -> Checked:
  """See `sizes.check`; for a process that has not loaded JAX."""
  os.environ['JAX_PLATFORMS'] = 'cpu'  # the members need all memory of a GPU
  from podracer_jit.sweep import sizes
  return sizes.check(groups, configs)


def _ended(folder: Folder, asked: Sequence[Member], code: int) -> int:
  """Prints how the sweep has ended; returns its exit code."""
  failed = [member for member in asked if member.name in folder.errors]
  for member in failed:
    complain(f'podracer_jit sweep: {member.name} has failed: {folder.errors[member.name]}')
  if failed:
    complain(f'podracer_jit sweep: {len(failed)} of {len(asked)} members have failed; their output '
             f'is in {folder.path / local.LOGS}, and --retry trains them again')
    return FAILED if code == FINISHED else code
  if code == STOPPED:
    say('not all members have finished; the same command goes on')
  if code == FINISHED:
    pruned = sum(map(folder.is_pruned, asked))
    every = f'all {len(asked)} members have' if len(asked) > 1 else 'the member has'
    ended = f'{every} finished' if not pruned else (
        f'{sum(map(folder.is_finished, asked))} of {len(asked)} members have finished, and '
        f'{pruned} were pruned')
    say(f'{ended}: podracer_jit report {folder.path}')
  return code
