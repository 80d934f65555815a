"""Measures how long a stopped run takes until it trains again, beside a run that begins.

.venv/bin/python -m benchmarks.back_again --configs=ppo_cartpole,impala_catch [--update=500]

Each config is trained up to --update, by default to the middle of its first segment, stopped by
SIGTERM, and started again. Simulators are then stepped through the actions of the segment. An
earlier process fills the compilation cache, which lacks only the program that replays.

- `trained`: seconds of training up to the stop, without compiling (`elapsed_s` in metrics.jsonl);
- `begin`: seconds from the command to the first update of the new run;
- `back`: seconds from the command to the first new update after the stop;
- `replayed`: steps of environments that were replayed.

`more` is `back` less `begin`: what the stop costs beside a start. Flags of training
(--config.NAME=VALUE) hold for all configs.

Exit code: 0; 1 if a training failed; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl.flags import FlagValues

from benchmarks.common import Failed, parse_config
from benchmarks.soak import read_update
from podracer_jit.errors import STOPPED
from podracer_jit.experiment.resolve import resolve
from podracer_jit.workdir import journal

POLL_S = 0.02


class Figures(NamedTuple):
  """The figures of a config; times are in seconds."""

  config: str
  update: int  # with which the run was stopped
  trained_s: float
  begin_s: float
  back_s: float
  replayed: int  # steps


class Trainings:
  """Starts trainings of one config, which share a compilation cache."""

  def __init__(self, flags: Sequence[str], root: Path):
    """Takes the flags of training, and a folder for workdirs, logs and the cache."""
    self._flags = flags
    self._root = root
    self._env = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(root / 'compiled')}

  def train(self, workdir: Path, last: int) -> tuple[float, str]:
    """Trains up to an update, and stops by SIGTERM.

    Args:
      workdir: of a new run, or of one that goes on.
      last: the process is stopped once it has made a new update, and this one.

    Returns:
      Seconds until the first new update, and the output.

    Raises:
      Failed: the training ended by itself.
    """
    metrics = workdir / journal.METRICS
    done = read_update(metrics)
    log = self._root / 'log'
    start = time.monotonic()
    first_s = 0.0
    with log.open('w') as file:
      process = subprocess.Popen(
          [sys.executable, '-m', 'podracer_jit', *self._flags, f'--workdir={workdir}'],
          stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=self._env)
    try:
      while not first_s or read_update(metrics) < last:
        time.sleep(POLL_S)
        if process.poll() is not None:
          raise Failed(process, log)
        if not first_s and read_update(metrics) > done:
          first_s = time.monotonic() - start
      process.send_signal(signal.SIGTERM)
      if process.wait() != STOPPED:
        raise Failed(process, log)
    finally:
      process.kill()
      process.wait()
    return first_s, log.read_text(errors='replace')


def measure(config: str, flags: Sequence[str], update: int, root: Path) -> Figures:
  """Returns the figures of a config.

  Args:
    config: a shipped config or a file.
    flags: further flags of training.
    update: after which the run is stopped; 0: half of its first segment.
    root: a new folder for workdirs.

  Raises:
    ValueError: the config is wrong, or its segments have no middle.
    Failed: a training ended by itself.
  """
  all_flags = [f'--config={config}', *flags]
  options = resolve(parse_config(['', *all_flags], FlagValues(), '')).env
  update = update or options.renew_every_updates // 2
  if not update:
    raise ValueError(f'{config}: env.renew_every_updates = {options.renew_every_updates}, so no '
                     'update is the middle of a segment; give --update')
  trainings = Trainings(all_flags, root)
  trainings.train(root / 'compiles', 1)
  begin_s, _ = trainings.train(root / 'run', update)
  stopped = journal.read_lines(root / 'run' / journal.METRICS)[-1]
  back_s, output = trainings.train(root / 'run', 1)
  replayed = re.search(r'replayed ([\d,]+) steps', output)
  return Figures(config, stopped['update'], stopped['elapsed_s'], begin_s, back_s,
                 int(replayed[1].replace(',', '')) if replayed else 0)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--configs', default='impala_catch,ppo_cartpole',
                      help='shipped configs or files, separated by commas')
  parser.add_argument('--update', type=int, default=0,
                      help='each run is stopped after it; 0: in the middle of its first segment')
  parser.add_argument('--json', type=Path, help='a file for all figures')
  args, flags = parser.parse_known_args(argv)
  rows = []
  print(f'{"config":28}{"update":>8}{"replayed":>12}{"trained s":>11}{"begin s":>9}{"back s":>9}'
        f'{"more s":>9}')
  try:
    for config in args.configs.split(','):
      with tempfile.TemporaryDirectory(prefix='back_again-') as folder:
        rows.append(measure(config, flags, args.update, Path(folder)))
      row = rows[-1]
      print(f'{row.config:28}{row.update:8}{row.replayed:12,}{row.trained_s:11.1f}'
            f'{row.begin_s:9.1f}{row.back_s:9.1f}{row.back_s - row.begin_s:9.1f}', flush=True)
  except (ValueError, Failed) as error:
    print(f'back_again: {error}', file=sys.stderr)
    return 2 if isinstance(error, ValueError) else error.code
  if args.json:
    args.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
