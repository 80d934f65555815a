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

--tasks=@atari5 names a list: @atari57, @atari5, @mujoco9, @dmc15 or @minatar.

With --search, values may be ranges: log(1e-4,1e-2), uniform(0,1) and int(1,8), of which Optuna
chooses so many (tpe:32, random:32). They are ranked by their newest evaluations; --prune=asha stops
members that are behind. This needs the extra `search`.

Exit code: 0 if all members have finished; 1 if a member has failed, which runs again only with
--retry; 2 if nothing was started; 3 if a signal has stopped the members, which have saved.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import multiprocessing
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from podracer_jit.cli import arguments, verb
from podracer_jit.errors import FAILED, FINISHED, STOPPED, InUse, Refused, refusing
from podracer_jit.parts import user_path
from podracer_jit.runtime.output import complain, say
from podracer_jit.sweep import fitting, local, members
from podracer_jit.sweep.fitting import Checked
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board, State
from podracer_jit.sweep.training import Listed, train
from podracer_jit.training import stopping
from podracer_jit.workdir import lock


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
      wanted = _wanted(values, shared)
      out = user_path(values.out)
      if not values.dry:
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_locked(out))
      folder = Folder(out, importlib.metadata.version('podracer_jit'))
      checked = _checked(folder, wanted)
      folder.add(checked.members, checked.configs)
      todo = [member for member in checked.members if not folder.is_finished(member)]
      if values.dry:
        for member in todo:
          say(shlex.join(member.command(out)))
        return FINISHED
      if values.retry:
        for member in todo:
          folder.retry(member)
      todo = [member for member in todo if member.name not in folder.errors]
      slots = local.slots(values.jobs)
      jobs = fitting.jobs_that_fit(values.jobs, len(slots),
                                   [checked.sizes[member.name] for member in todo])
      fitting.check_disk(out, [checked.sizes[member.name] for member in todo
                               if not (out / member.name).exists()])
      folder.write()
    stop.begin_training()
    board = stack.enter_context(contextlib.closing(
        Board(out, checked.members, {name: size.steps for name, size in checked.sizes.items()})))
    board.say(f'{out}: {len(checked.members)} members, {len(todo)} to train, {jobs} at once')
    for member in checked.members:
      if folder.is_finished(member):
        board.tell(member, State.FINISHED)
      elif member.name in folder.errors:
        board.tell(member, State.FAILED, folder.errors[member.name])
    code = train(folder, Listed(todo), local.Local(out, local.slots(jobs)), stop, board)
  return _ended(folder, checked.members, code)


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
  flags.DEFINE_bool('dry', False, 'Only print the commands of the members that are not finished.',
                    **text)
  flags.DEFINE_bool('retry', False, 'Train members again that have failed.', **text)
  return values


def _wanted(values: flags.FlagValues, shared: Sequence[str]) -> list[Member]:
  """Returns the members that the flags ask for, each with one seed.

  Raises:
    ValueError: a flag is wrong.
  """
  for arg in shared:
    if '=' not in arg:
      raise ValueError(f'{arg}: has no value; write {arg}=VALUE')
  return members.product(values.config, values.tasks, members.seeds_of(values.seeds),
                         [members.values_of(flag) for flag in values.grid], shared)


@contextlib.contextmanager
def _locked(out: Path):
  """Locks the folder of the sweep during the block.

  Raises:
    Refused: another sweep has it.
  """
  try:
    held = lock.WorkdirLock(out)
  except InUse as error:
    raise Refused(str(error).replace('--workdir', '--out')) from None
  with contextlib.closing(held):
    yield


def _checked(folder: Folder, wanted: Sequence[Member]) -> Checked:
  """Returns the members of the sweep that train what is wanted, checked in another process.

  Raises:
    ValueError: a config is wrong.
  """
  known = {member.name for member in folder.members}
  covering = list(folder.covering(wanted))
  alone = folder.not_covered(wanted)
  groups = [[member] for member in covering + [each for each in alone if each.name in known]]
  groups += members.same_but_seeds([each for each in alone if each.name not in known])
  # JAX would take memory here as long as the sweep lasts, and its threads do not survive a fork.
  with concurrent.futures.ProcessPoolExecutor(
      1, mp_context=multiprocessing.get_context('spawn')) as pool:
    return pool.submit(_check, groups, folder.configs).result()


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
    say('stopped; the same command goes on')
  if code == FINISHED:
    say(f'all {len(asked)} members have finished: podracer_jit report {folder.path}')
  return code
