"""examples/one_page.py has the receipts of trainings."""

import re
import sys
from pathlib import Path

import pytest

from podracer_jit.workdir import journal
from tests import processes

PROGRAM = Path(__file__).parent.parent / 'examples' / 'one_page.py'


@pytest.mark.parametrize('scheme, lag, groups', [
    ('sync', 0, 1), ('cleanba', 1, 1), pytest.param('cleanba', 1, 4, marks=pytest.mark.full)])
def test_its_updates_are_those_of_a_training(scheme, lag, groups, tmp_path):
  program, count = re.subn('^LAG = 0', f'LAG = {lag}', PROGRAM.read_text(), flags=re.MULTILINE)
  assert count == 1
  program, count = re.subn('4, 4, 1, 5_000', f'4, 4, {groups}, 5_000', program)
  assert count == 1
  printed = processes.run([sys.executable, '-c', program], cwd=tmp_path)
  assert printed.returncode == 0, printed.stderr

  trained = processes.run(processes.command(
      '--config=ppo_cartpole:smoke', f'--config.scheme={scheme}',
      f'--config.num_grad_shards={groups}', f'--workdir={tmp_path}/run'))
  assert trained.returncode == 0, trained.stderr
  receipts = journal.read_receipts(tmp_path / 'run').by_update
  expected = [f'{update} {receipt["batch"]} {receipt["params"]}'
              for update, receipt in receipts.items()]
  assert len(expected) == 6
  assert printed.stdout.splitlines() == expected
