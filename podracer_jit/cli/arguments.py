"""Flags that several verbs have, and their help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from podracer_jit.errors import Refused
from podracer_jit.parts import user_path
from podracer_jit.runtime.output import complain

# Verbs that need no JAX import this module, so functions import what needs it.
if TYPE_CHECKING:
  from podracer_jit.play.agent import Agent


def run_flags() -> flags.FlagValues:
  """Defines flags that name a run; absl's global flags belong to the importing program."""
  from podracer_jit.experiment import modules

  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'The workdir of the run.', flag_values=values)
  flags.DEFINE_list('allow_modules', [], modules.HELP, flag_values=values)
  return values


def agent_flags() -> flags.FlagValues:
  """Defines flags that name a checkpoint of a run, for `agent_of`."""
  values = run_flags()
  flags.DEFINE_string('update', None, 'The checkpoint: its update, or best for the checkpoint with '
                      'the best evaluation during training. Default: the newest whole checkpoint.',
                      flag_values=values)
  return values


def read(argv: Sequence[str], values: flags.FlagValues, doc: str, needed: Sequence[str] = ()
         ) -> list[str] | None:
  """Reads a command line into flags; with --help, prints the help.

  Args:
    argv: the command line.
    values: the flags of the verb; receives their values, and --help.
    doc: the docstring of the verb's module; its first example shows the flags that are needed.
    needed: names of flags that must have a value.

  Returns:
    The arguments that are no flags; None after the help.

  Raises:
    Refused: a flag is wrong or missing.
  """
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', flag_values=values)
  try:
    others = values(list(argv))[1:]
  except flags.Error as error:
    raise Refused(str(error)) from None
  if values.help:
    print(f'{doc}\n{values.get_help()}')
    return None
  if any(values[name].value in (None, '') for name in needed):
    names = ' and '.join(f'--{name}' for name in needed)
    example = re.search(r'podracer_jit \w+ --.*', doc)[0]
    raise Refused(f'{names} {"are" if len(needed) > 1 else "is"} needed: {example}')
  return others


def read_flags(argv: Sequence[str], values: flags.FlagValues, doc: str, needed: Sequence[str] = ()
               ) -> bool:
  """Does the work of `read` for a verb whose arguments are all flags.

  Args:
    argv: see `read`.
    values: see `read`.
    doc: see `read`.
    needed: see `read`.

  Returns:
    False after the help.

  Raises:
    Refused: a flag is wrong or missing, or an argument is no flag.
  """
  others = read(argv, values, doc, needed)
  for other in others or ():
    raise Refused(f'{other}: not a flag; flags begin with --')
  return others is not None


def agent_of(verb: str, values: flags.FlagValues) -> Agent:
  """Returns the agent that the flags of `agent_flags` name.

  Args:
    verb: the name of the verb, for a line about newer checkpoints that are broken.
    values: the flags.

  Raises:
    ValueError: there is no such run or checkpoint.
  """
  from podracer_jit.experiment import modules
  from podracer_jit.play.agent import load_run
  from podracer_jit.training import evaluator

  workdir = user_path(values.workdir)
  update = evaluator.chosen_update(values.update, workdir)
  allowed = modules.allowed(values.allow_modules)
  agent, note = load_run(workdir, update, allow_modules=allowed)
  if note:
    complain(f'podracer_jit {verb}: {note}')
  return agent
