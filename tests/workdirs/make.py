"""Makes the kept workdirs of a version: runs that newer versions resume in tests.

python -m tests.workdirs.make [--python=OTHER_VENV/bin/python] [--only=NAME,...]

The version is the one that is installed for this Python. For an older commit, check it out,
install it into a venv of its own (scripts/_venv shows how), and pass its Python.

`vX_Y_Z/NAME/` is the workdir of a run after its first checkpoint, as if it had been killed there.
`vX_Y_Z/NAME.jsonl` has the receipts that the same run wrote afterwards: a run that is resumed on
an equal machine must write them, too. Programs are compiled as tests compile them. Delete a workdir
to make it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.flags import COMPILED_SOON

FOLDER = Path(__file__).parent


class Kept(NamedTuple):
  """A run whose workdir is kept.

  Attributes:
    flags: of the command that resumes it.
    commands: flags of the commands that make it, one after the other in one workdir.
    processes: number of processes.
    source: flags of another run, with whose state this run begins; None: it begins with its seed.
  """

  flags: tuple[str, ...] = ()
  commands: tuple[tuple[str, ...], ...] = ((),)
  processes: int = 1
  source: tuple[str, ...] | None = None


FASTER = '--config.optimizer.learning_rate=0.002'
RUNS = {
    'moments': Kept(),
    'recurrent': Kept(),
    'fifo_replay': Kept(),
    'prioritised_replay': Kept(),
    'jax_replay': Kept(),
    'grouped_replay': Kept(),
    'gymnax': Kept(),
    'own_jax': Kept(),
    'dict_of_boxes': Kept(),
    'dict_with_discrete': Kept(),
    'changed': Kept((FASTER,), (
        ('--config.total_steps=64',),
        (FASTER, '--change=optimizer.learning_rate', '--extend', '--config.total_steps=128'),
        (FASTER, '--extend'))),
    'inherited': Kept(source=('--config.seed=5', '--config.total_steps=64')),
    'two_processes': Kept(processes=2),
}


def flags_of(name: str, workdir: Path, more: Sequence[str] = (), folder: Path = FOLDER
             ) -> list[str]:
  """Returns the flags of a training in a workdir.

  Args:
    name: of the run.
    workdir: its workdir.
    more: further flags.
    folder: where the configs are.
  """
  return [f'--config={folder / "tiny.py"}:{name}', f'--workdir={workdir}', *more]


def borrow(python: str, temporary: Path) -> None:
  """Puts the package and the configs into a folder, since a workdir records its command's paths.

  Args:
    python: of the version whose package it is.
    temporary: the folder.
  """
  code = 'import podracer_jit; print(podracer_jit.__path__[0])'
  package = subprocess.run([python, '-P', '-c', code], text=True, check=True, capture_output=True)
  (temporary / 'podracer_jit').symlink_to(package.stdout.strip())
  for name in ('tiny.py', 'tiny_envs.py'):
    shutil.copy(FOLDER / name, temporary)


def train(python: str, temporary: Path, name: str, workdir: Path, more: Sequence[str]) -> None:
  """Trains in a process of its own, or in several.

  Args:
    python: of the version that trains.
    temporary: a folder with the package and the configs, and for compiled programs.
    name: of the run.
    workdir: its workdir.
    more: further flags.

  Raises:
    SystemExit: the training failed; the message has its output.
  """
  launch = ['launch', '-n', str(RUNS[name].processes), '--'] if RUNS[name].processes > 1 else []
  command = [python, '-P', '-m', 'podracer_jit', *launch,
             *flags_of(name, workdir, more, temporary)]
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': COMPILED_SOON,
      'PYTHONPATH': str(temporary), 'PYTHONDONTWRITEBYTECODE': '1',
      'XDG_CACHE_HOME': str(temporary / 'cache'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
  done = subprocess.run(command, env=environment, cwd=temporary, text=True, check=False,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  if done.returncode:
    raise SystemExit(f'{name} failed:\n{done.stdout}')


def updates_in(workdir: Path) -> list[int]:
  """Returns the updates of the checkpoints, in order."""
  return sorted(int(path.name) for path in (workdir / 'checkpoints').iterdir())


def kept_update(workdir: Path) -> int:
  """Returns the update of the checkpoint to keep: the first one with the newest config."""
  history = json.loads((workdir / 'config.json').read_text()).get('history', [])
  newest = max((entry['first_update'] for entry in history), default=1)
  kept, *later = [update for update in updates_in(workdir) if update >= newest]
  if not later:
    raise SystemExit(f'{workdir.name}: no update follows the checkpoint of update {kept}')
  return kept


def cut(path: Path, update: int) -> Iterator[str]:
  """Cuts a file with a line for each update after an update, and yields the lines cut off."""
  lines = path.read_text().splitlines(keepends=True)
  later = [line for line in lines if json.loads(line).get('update', 0) > update
           or json.loads(line).get('first_update', 0) > update]
  path.write_text(''.join(line for line in lines if line not in later))
  yield from later


def make(python: str, name: str) -> None:
  """Makes the workdir of a run, and the receipts that follow.

  Args:
    python: of the version that trains.
    name: of the run.
  """
  run = RUNS[name]
  with tempfile.TemporaryDirectory(prefix='workdirs-') as folder:
    temporary = Path(folder)
    borrow(python, temporary)
    workdir = temporary / name
    begins = []
    if run.source is not None:
      train(python, temporary, name, temporary / 'source', run.source)
      begins = [f'--init_from={temporary / "source"}']
    for flags in run.commands:
      train(python, temporary, name, workdir, [*begins, *flags])

    kept = kept_update(workdir)
    for update in updates_in(workdir):
      if update not in (0, kept):
        shutil.rmtree(workdir / 'checkpoints' / str(update))
    expected = ''.join(cut(workdir / 'receipts.jsonl', kept))
    list(cut(workdir / 'metrics.jsonl', kept))

    version = json.loads((workdir / 'config.json').read_text())['versions']['podracer_jit']
    target = FOLDER / f'v{version.replace(".", "_")}' / name
    if target.exists():  # perhaps of older code, which newer code must resume
      print(f'{target.relative_to(FOLDER)}: is kept already')
      return
    shutil.copytree(workdir, target)
    target.with_suffix('.jsonl').write_text(expected)
  size = sum(path.stat().st_size for path in target.rglob('*') if path.is_file())
  print(f'{target.relative_to(FOLDER)}: update {kept}, {size / 1000:.0f} kB')


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--python', default=sys.executable, help='of the version')
  parser.add_argument('--only', default=','.join(RUNS), help='names of runs, by comma')
  args = parser.parse_args()
  names = args.only.split(',')
  unknown = sorted(set(names) - set(RUNS))
  if unknown:
    parser.error(f'--only: there is no run {unknown[0]!r}; known are {", ".join(RUNS)}')
  for name in names:
    make(args.python, name)
  return 0


if __name__ == '__main__':
  sys.exit(main())
