"""Shared by the benchmarks that start runs of the command: their config, and how a run failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer_jit.run.experiment import Experiment

DEFAULT = ['--config=configs/impala_atari.py:nature_cnn', '--config.env.task=Pong-v5']


class Failed(RuntimeError):
  """A run did not get to what was to be measured; `code` is for whoever started this."""

  def __init__(self, process: subprocess.Popen, log: Path):
    lines = log.read_text(errors='replace').split('\n')
    said = [line for line in lines if line.startswith('podracer_jit: ')] or lines
    super().__init__(' '.join([f'exit code {process.returncode}:', *said[-1:]]))
    self.code = 2 if process.returncode == 2 else 1  # 2: what could not start


def with_default(argv: Sequence[str]) -> list[str]:
  """The command line, with DEFAULT where it names no config."""
  named = any(arg.partition('=')[0] in ('--config', '-config') for arg in argv[1:])
  return [*argv] if named else [argv[0], *DEFAULT, *argv[1:]]


def write_config(path: Path, config: Mapping[str, Any]) -> Path:
  """Writes a config file of just these values, for other processes; returns its path."""
  path.write_text('from ml_collections import ConfigDict\n\n\ndef get_config():\n'
                  f'  return ConfigDict({dict(config)!r})\n')
  return path


def refuse_replay(experiment: Experiment) -> None:
  """Raises ValueError for a replay: its first updates are not like the later ones."""
  if experiment.algorithm.learns_from_replay:
    raise ValueError(f'--config: {experiment.loss_name} draws from a replay; '
                     'benchmarks.replay measures that')


def count_lines(path: Path) -> int:
  """Whole lines of a file that may not be there yet."""
  return path.read_bytes().count(b'\n') if path.exists() else 0
