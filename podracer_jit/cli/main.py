"""The program `podracer_jit`: `podracer_jit VERB ...` runs a verb, `--config=...` alone trains."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from podracer_jit.errors import FAILED, FINISHED, INTERRUPTED, REFUSED
from podracer_jit.options import hint
from podracer_jit.runtime.output import complain, give_up_lost_streams, open_closed_streams
from podracer_jit.training import stopping

VERBS = {
    'train': 'train, as without a verb',
    'evaluate': 'play whole episodes with the newest checkpoint of a run',
    'export': 'write an agent for programs that do not have this package',
    'compare': 'tell whether two runs are the same to the last bit',
    'report': 'write a page about runs: curves, scores, commands, and what is unusual',
    'rerun': 'repeat one update of a run and write its rollout',
    'sweep': 'train a config with several tasks, seeds and values',
    'launch': 'train with several processes on this machine',
    'configs': 'list the configs of the package',
    'envs': 'list the tasks of all kinds of environments',
    'metrics': 'list all metrics: meaning, unit, what is unusual, both names',
}
MOVED = {'benchmark': 'benchmarks.parts', 'tune': 'benchmarks.tune'}
HELP = """Trains, or runs a verb:

  podracer_jit --config=configs/pong_laptop.py --workdir=runs/pong
  podracer_jit --config=pong_laptop --help    lists the fields of a config
  podracer_jit evaluate --workdir=runs/pong
  podracer_jit --version

Verbs (podracer_jit VERB --help explains each):

""" + '\n'.join(f'  {verb:10} {meaning}' for verb, meaning in VERBS.items())


def main(argv: Sequence[str]) -> int:
  """Runs the verb that is the first argument, or trains; returns the exit code."""
  began_s = time.perf_counter()
  program, *args = argv
  verb = 'train'
  if args and not args[0].startswith('-'):
    verb, *args = args
    program = f'podracer_jit {verb}'
    if verb in MOVED:
      complain(f'{program}: no verb since 0.7; in a checkout of the repository, it is python -m '
               f'{MOVED[verb]}')
      return REFUSED
    if verb not in VERBS:
      complain(f'podracer_jit: {_no_command(verb)}')
      return REFUSED
  elif args == ['--version']:
    print(f'podracer_jit {importlib.metadata.version("podracer_jit")}')
    return FINISHED
  elif _asks_for_help(args):
    print(f'{HELP}\n')
  with stopping.handled():
    # Imported here because not all verbs need JAX.
    command = importlib.import_module(f'podracer_jit.cli.{verb}')
  if not gc.isenabled():  # see `run`
    gc.freeze()
    gc.enable()
  if verb == 'train':
    return command.main([program, *args], began_s)
  return command.main([program, *args])


def _asks_for_help(args: Sequence[str]) -> bool:
  """Returns whether the help of the program, and not only that of a config, is asked for."""
  names = {arg.partition('=')[0] for arg in args}
  return bool(names & {'-h', '-help', '--help'} and not names & {'-config', '--config'})


def run() -> None:
  """Runs the installed command."""
  # JAX makes a great many small objects while it traces, and nearly all of them stay. Fewer
  # collections save a tenth of the time of a short command.
  gc.set_threshold(50_000, 20, 50)
  # `main` enables it again: imports leave nothing to collect.
  gc.disable()
  open_closed_streams()
  try:
    code = main(sys.argv)
    stopping.ignore()
    sys.stdout.flush()
  except BrokenPipeError:  # as in `podracer_jit envs | head`
    code = 128 + signal.SIGPIPE
  except KeyboardInterrupt:
    complain('podracer_jit: interrupted')
    code = INTERRUPTED
  give_up_lost_streams()
  if code == FAILED or any(thread.name == stopping.BESIDE for thread in threading.enumerate()):
    # A normal exit would let libraries print errors about open resources below the message, or wait
    # for a compilation.
    os._exit(code)
  # The interpreter looks for unreachable objects as it ends: almost a second with JAX's objects.
  gc.freeze()
  sys.exit(code)


def _no_command(word: str) -> str:
  """Returns the error message for an unknown verb, with a similar one if there is one."""
  config = Path(word.partition(':')[0])
  shipped = Path(__file__).parents[1] / 'configs' / f'{config}.py'
  if config.suffix == '.py' or config.name.isidentifier() and shipped.is_file():
    return f'{word}: no such command; to train with this config: podracer_jit --config={word}'
  near = hint(word, VERBS)
  if near:
    return f'{word}: no such command{near}'
  return f'{word}: no such command; there are {", ".join(VERBS)}'
