"""What a person gets who calls the command wrongly, in a process of its own."""

import subprocess
import sys

import pytest

from tests.runs import QUICK


@pytest.mark.quick
def test_a_field_that_is_not_there_is_refused_in_one_line(tmp_path):
  done = subprocess.run(
      [sys.executable, '-m', 'podracer_jit', '--config=configs/impala_catch.py:smoke',
       '--config.sede=3', f'--workdir={tmp_path}/run'],
      capture_output=True, text=True, timeout=300, env=QUICK, check=False)
  assert done.returncode == 2
  (line,) = [line for line in done.stderr.splitlines() if 'podracer_jit: ' in line]
  assert '--config.sede' in line and 'seed' in line
  assert not (tmp_path / 'run').exists()
