"""Helpers that several benchmarks share: configs, output, and errors of a process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from podracer_jit.experiment.flags import parse
from podracer_jit.experiment.schema import Experiment

DEFAULT = ['--config=configs/impala_atari.py:nature_cnn', '--config.env.task=Pong-v5']


class Failed(RuntimeError):
  """A training process ended before it was measured.

  Attributes:
    code: the exit code for the benchmark itself: 2 if the training could not start, otherwise 1.
  """

  def __init__(self, process: subprocess.Popen, log: Path):
    lines = log.read_text(errors='replace').split('\n')
    errors = [line for line in lines if line.startswith('podracer_jit: ')] or lines
    super().__init__(' '.join([f'exit code {process.returncode}:', *errors[-1:]]))
    self.code = 2 if process.returncode == 2 else 1


def with_default(argv: Sequence[str]) -> list[str]:
  """Returns the command line; adds DEFAULT if it names no config."""
  named = any(arg.partition('=')[0] in ('--config', '-config') for arg in argv[1:])
  return [*argv] if named else [argv[0], *DEFAULT, *argv[1:]]


def parse_config(argv: Sequence[str], values: flags.FlagValues, text: str
                 ) -> dict[str, Any] | None:
  """Returns the config of a benchmark's command line; None with --help, which is printed.

  Args:
    argv: the command line.
    values: the benchmark's own flags; receives their values.
    text: what --help prints above the flags.

  Raises:
    ValueError: see `flags.parse`.
  """
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  logging.set_verbosity(logging.ERROR)  # paused workers wait for long, and would log that
  config = parse(argv, values)
  if config is None:
    print(f'{text}\n{values.get_help()}')
  return config


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
  """Writes a config file with these values, for other processes; returns its path."""
  path.write_text('from ml_collections import ConfigDict\n\n\ndef get_config():\n'
                  f'  return ConfigDict({dict(config)!r})\n')
  return path


def refuse_replay(experiment: Experiment) -> None:
  """Refuses an algorithm that learns from a replay: its first updates only fill the replay.

  Raises:
    ValueError: the experiment's algorithm learns from a replay.
  """
  if experiment.algorithm.learns_from_replay:
    raise ValueError(f'--config: {experiment.loss_name} learns from a replay, which this benchmark '
                     'does not support; use benchmarks.replay')


def count_lines(path: Path) -> int:
  """Returns the number of whole lines of a file; 0 if the file does not exist."""
  return path.read_bytes().count(b'\n') if path.exists() else 0


def say(line: str) -> None:
  """Prints a line about the progress."""
  print(line, file=sys.stderr, flush=True)
