"""Runs a benchmark in its own process."""

import sys
from pathlib import Path

from tests import processes

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(name, *args):
  """Returns the completed process of `python -m benchmarks.NAME ARGS`."""
  return processes.run([sys.executable, '-P', '-m', f'benchmarks.{name}', *args], cwd=ROOT,
                       timeout=600)
