"""Reads the flags of a verb, and prints its help."""

from __future__ import annotations

import re
from collections.abc import Sequence

from absl import flags

from podracer_jit.errors import Refused, refusing
from podracer_jit.options import line_of_flag, refuse_empty


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
    raise Refused(line_of_flag(error)) from None
  if values.help:
    print(f'{doc}\n{values.get_help()}')
    return None
  if any(values[name].value in (None, '') for name in needed):
    names = ' and '.join(f'--{name}' for name in needed)
    example = re.search(r'podracer_jit \w+ .*--.*', doc)[0]
    raise Refused(f'{names} {"are" if len(needed) > 1 else "is"} needed: {example}')
  with refusing():
    refuse_empty(values)
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
