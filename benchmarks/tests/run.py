"""Runs a benchmark in a process of its own, as people do."""

import sys
from pathlib import Path

from tests import processes

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(name, *args):
  """Returns the completed process of `python -m benchmarks.NAME ARGS`."""
  return processes.run([sys.executable, '-P', '-m', f'benchmarks.{name}', *args], cwd=ROOT,
                       timeout=600)
