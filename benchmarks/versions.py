"""Tries the package with each version of Python and JAX that podracer_jit/runtime/tried.py names.

scripts/versions --folder=/tmp/versions
scripts/versions --folder=/tmp/versions --pythons=3.12 --jax=0.11.2,0.12.0.1

Each pair has a virtual environment in the folder (3 GB), with the packages of the Python's lock
file but for jax and jaxlib, and with the oldest Python's EnvPool where the jax needs an older one.
In it, three configs make their smoke run twice, the second time with more threads, with equal
receipts; and the quick tests run. A pair that has passed at this commit is not tried again. Exit
code: 0 if all have passed, 1 if not, or if an interpreter is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from podracer_jit.runtime import tried

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ('impala_catch', 'ppo_mujoco', 'sac_pendulum')
RESULTS = 'results.jsonl'
LIMIT_S = 1800.0  # of a step; XLA has not ended with a version
# Libraries whose versions the table names, beside JAX's.
NAMED = ('envpool', 'flax', 'orbax-checkpoint', 'numpy')
_ACCEPTS = 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])'


class Failed(RuntimeError):
  """Raised if a step of a pair fails; the message is one line, and names the log."""


class Pair(NamedTuple):
  """A version of Python and one of JAX."""

  python: str  # '3.12'
  jax: str

  @property
  def name(self) -> str:
    """The name of its folder."""
    return f'py{self.python}-jax{self.jax}'


def plan(pythons: Sequence[str] = (), versions: Sequence[str] = ()) -> list[Pair]:
  """Returns the pairs to try, in the order of `tried.JAX`.

  Args:
    pythons: of these Pythons only; none: of all.
    versions: with these versions of JAX only, which `tried.JAX` need not have; none: with its own.

  Raises:
    ValueError: the package does not run with such a Python.
  """
  for python in pythons:
    if python not in tried.JAX:
      raise ValueError(f'--pythons: must be of {", ".join(tried.JAX)}, got {python}')
  return [Pair(python, jax) for python, own in tried.JAX.items() if not pythons or python in pythons
          for jax in versions or own]


def pins(lock: str, jax: str, older: str) -> list[str]:
  """Returns the lines of a lock file with another version of jax and jaxlib.

  Args:
    lock: its text.
    jax: the version.
    older: the text of a lock file whose EnvPool is taken if the first one's needs a newer jax.
  """
  lines = _lines(lock)
  (envpool,) = [line.partition('==')[2] for line in lines if line.startswith('envpool==')]
  if tried.misfit(envpool, jax):
    lines = [line for line in lines if not line.startswith('envpool')]
    lines += [line for line in _lines(older) if line.startswith('envpool')]
  return [*(line for line in lines if not re.match(r'(jax|jaxlib)==', line)),
          f'jax=={jax}', f'jaxlib=={jax}']


def _lines(lock: str) -> list[str]:
  """Returns the lines of a lock file that name packages."""
  lines = map(str.strip, lock.splitlines())
  return [line for line in lines if line and not line.startswith('#')]


def candidates(python: str) -> Iterator[str]:
  """Yields the commands that may be an interpreter of this version."""
  yield f'python{python}'
  of_pyenv = Path(os.environ.get('PYENV_ROOT') or Path.home() / '.pyenv') / 'versions'
  for folder in sorted(of_pyenv.glob(f'{python}.*'), key=lambda x: tried.order(x.name))[::-1]:
    yield str(folder / 'bin' / 'python')


def interpreter(python: str) -> str | None:
  """Returns an interpreter that can make virtual environments; None if there is none."""
  for command in candidates(python):
    try:
      done = subprocess.run([command, '-c', _ACCEPTS], capture_output=True, text=True, check=False)
    except OSError:
      continue
    if done.returncode == 0 and done.stdout.strip() == python:
      return command
  return None


def commit() -> str:
  """Returns the commit of the repository, with a + if files have changed since."""
  def git(*args: str) -> str:
    return subprocess.run(['git', '-C', str(ROOT), *args], capture_output=True, text=True,
                          check=True).stdout.strip()
  changed = git('diff', 'HEAD', '--name-only')
  return git('rev-parse', '--short=12', 'HEAD') + ('+' if changed else '')


class Trial:
  """The steps of one pair, in its folder."""

  def __init__(self, pair: Pair, folder: Path):
    """Makes the folder, if it is not there.

    Args:
      pair: to try.
      folder: of all pairs.
    """
    self._pair = pair
    self._folder = folder / pair.name
    self._folder.mkdir(parents=True, exist_ok=True)
    self._python = str(self._folder / 'venv' / 'bin' / 'python')

  def install(self, base: str) -> str:
    """Makes the virtual environment, unless it is complete; returns what pip says of its parts.

    Args:
      base: the interpreter.
    """
    lock, older = ((ROOT / f'requirements-{python}.lock').read_text()
                   for python in (self._pair.python, min(tried.JAX)))
    lines = pins(lock, self._pair.jax, older)
    wanted = '\n'.join(lines) + '\n'
    complete = self._folder / 'installed.txt'
    if not complete.exists() or complete.read_text() != wanted:
      complete.unlink(missing_ok=True)
      pinned = self._folder / 'pins.txt'
      pinned.write_text(wanted)
      self._run('venv', base, '-m', 'venv', '--clear', self._folder / 'venv')
      # --no-deps: a library may forbid a version of JAX with which it works all the same.
      pip = (self._python, '-m', 'pip', 'install', '--quiet', '--no-compile', '--no-deps')
      self._run('pip', *pip, '--only-binary=:all:', '-r', pinned)
      self._run('pip', *pip, '--no-build-isolation', '-e', ROOT)
      pinned.rename(complete)
    done = subprocess.run([self._python, '-m', 'pip', 'check'], capture_output=True, text=True,
                          check=False)
    return '; '.join(re.sub(r', but you have .*', '', line) for line in done.stdout.splitlines()
                     if done.returncode)

  def versions(self) -> dict[str, str]:
    """Returns the versions of Python and of NAMED."""
    program = ('import importlib.metadata as m, json, platform\n'
               f'print(json.dumps(dict(python=platform.python_version(), '
               f'**{{name: m.version(name) for name in {NAMED}}})))')
    return json.loads(self._run('versions', self._python, '-c', program))

  def smoke(self, config: str) -> str:
    """Makes the smoke run of a config twice; returns how many updates were identical."""
    workdirs = [self._folder / f'{config}-{i}' for i in (1, 2)]
    train = (self._python, '-P', '-m', 'podracer_jit')
    for workdir, more in zip(workdirs, ((), ('--config.placement.xla_threads=3',)), strict=True):
      self._run(workdir.name, 'rm', '-rf', workdir)
      self._run(workdir.name, *train, f'--config={config}:smoke', f'--workdir={workdir}', *more)
    compared = self._run(f'{config}-compare', *train, 'compare', *workdirs)
    return re.search(r'identical: (\d+ updates)', compared)[1]

  def quick(self, at_once: int) -> str:
    """Runs the quick tests; returns how many have passed, and so on.

    Args:
      at_once: processes of pytest; 0: none but its own.
    """
    out = self._run('quick', self._python, '-m', 'pytest', '-q', '-n', at_once, '--dist',
                    'worksteal', '--compile-soon', '-m', 'quick', '--color=no')
    return re.search(r'^(\d+ passed.*?) in ', out, re.MULTILINE)[1]

  def _run(self, log: str, *command: str | Path | int) -> str:
    """Runs a command in the repository; returns its output, which the log keeps.

    Raises:
      Failed: its exit code is not 0, or it did not end in LIMIT_S.
    """
    path = self._folder / f'{log}.log'
    # The cache of compiled programs is the pair's own.
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PIP_DISABLE_PIP_VERSION_CHECK': '1',
                                'XDG_CACHE_HOME': str(self._folder / 'cache')}
    environment.pop('PYTHONPATH', None)
    try:
      done = subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
      path.write_bytes(error.stdout or b'')
      raise Failed(f'{log} did not end in {LIMIT_S:,.0f} s; see {path}') from None
    path.write_text(done.stdout)
    if done.returncode:
      lines = done.stdout.strip().splitlines() or ['']
      raise Failed(f'{log} failed ({lines[-1][:80]}); see {path}')
    return done.stdout


def attempt(pair: Pair, base: str, folder: Path, at_once: int) -> dict[str, str]:
  """Tries a pair; returns what each step has given, and `failed` if one has failed.

  Args:
    pair: to try.
    base: the interpreter.
    folder: of all pairs.
    at_once: see `Trial.quick`.
  """
  result: dict[str, str] = {}
  trial = Trial(pair, folder)
  try:
    result['pip check'] = trial.install(base)
    result |= trial.versions()
    for config in CONFIGS:
      result[config] = trial.smoke(config)
    result['quick'] = trial.quick(at_once)
  except Failed as error:
    result['failed'] = str(error)
  return result


def table(results: Mapping[Pair, Mapping[str, str]]) -> str:
  """Returns the results as a table in Markdown."""
  columns = ('python', 'jax', *NAMED, *CONFIGS, 'quick')
  rows = [' | '.join(columns), ' | '.join('---' for _ in columns)]
  notes = []
  for pair, result in results.items():
    cells = dict(pair._asdict()) | dict(result)
    rows.append(' | '.join(cells.get(column, '-') for column in columns))
    notes += [f'Python {pair.python}, jax {pair.jax}: {result[key]}'
              for key in ('failed', 'pip check') if result.get(key)]
  return '\n'.join([*(f'| {row} |' for row in rows), '', *notes])


def passed_before(folder: Path, at: str) -> dict[Pair, dict[str, str]]:
  """Returns the results of pairs that have passed at a commit."""
  path = folder / RESULTS
  lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return {Pair(line['pair'][0], line['pair'][1]): line['result'] for line in lines
          if line['commit'] == at and 'failed' not in line['result']}


def main(argv: Sequence[str] | None = None) -> int:
  """Tries the pairs; returns the exit code."""
  parser = argparse.ArgumentParser(prog='scripts/versions', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', type=Path, required=True, help='for virtual environments, logs '
                      f'and {RESULTS}')
  for name, what in (('--pythons', 'Python'), ('--jax', 'jax')):
    parser.add_argument(name, type=lambda text: text.split(','), default=(),
                        help=f'versions of {what}, by comma; default: those of tried.py')
  parser.add_argument('--at_once', type=int, default=3 if (os.cpu_count() or 1) > 1 else 0,
                      help='processes of pytest; 0: none but its own')
  args = parser.parse_args(argv)
  try:
    pairs = plan(args.pythons, args.jax)
  except ValueError as error:
    parser.error(str(error))
  args.folder.mkdir(parents=True, exist_ok=True)
  folder = args.folder.resolve()
  at = commit()
  results: dict[Pair, dict[str, str]] = {}
  for pair in pairs:
    before = passed_before(folder, at).get(pair)
    if before:
      results[pair] = before
      continue
    base = interpreter(pair.python)
    if base is None:
      results[pair] = {'failed': f'no interpreter: none of {", ".join(candidates(pair.python))} is '
                                 f'a Python {pair.python} with venv and ensurepip'}
      continue
    print(f'Python {pair.python}, jax {pair.jax} ...', file=sys.stderr, flush=True)
    began_s = time.monotonic()
    results[pair] = attempt(pair, base, folder, args.at_once)
    print(f'{results[pair].get("failed", "passed")} ({time.monotonic() - began_s:.0f} s)',
          file=sys.stderr, flush=True)
    with (folder / RESULTS).open('a') as file:
      file.write(json.dumps(dict(pair=pair, commit=at, result=results[pair])) + '\n')
  print(table(results))
  return int(any('failed' in result for result in results.values()))


if __name__ == '__main__':
  sys.exit(main())
