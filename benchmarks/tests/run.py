"""Runs a benchmark in a process of its own, as people do."""

import subprocess
import sys
from pathlib import Path

from tests.runs import QUICK

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(name, *args):
  """Returns the completed process of `python -m benchmarks.NAME ARGS`."""
  return subprocess.run([sys.executable, '-m', f'benchmarks.{name}', *args], cwd=ROOT, timeout=600,
                        env=QUICK | {'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True,
                        check=False)
