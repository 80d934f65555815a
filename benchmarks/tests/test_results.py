"""Rows of docs/results.csv: from real workdirs, trained again, and as docs/results.md has them."""

import math
import sys

import numpy as np
import pytest

from benchmarks import results
from benchmarks.tests.run import ROOT, run_benchmark
from tests import processes

ROW = results.Row('ppo_cartpole', 'CartPole-v1', '--config.num_shards=2', 1000,
                  'greedy, 20 episodes', '1 2 3', '1 2 3', 12.4, 'abc', '2026-11-28', 'EPYC')


def test_a_further_seed_is_expected_in_the_prediction_interval():
  # Student's t for 99% and two degrees of freedom is 9.925; the deviation is 1.
  half = 9.925 * math.sqrt(4 / 3)
  np.testing.assert_allclose(results.expected(np.array([1.0, 2, 3])), (2 - half, 2 + half), 1e-4)
  assert results.expected(np.array([5.0, 5, 5])) == (5, 5)


def test_a_row_in_markdown():
  assert ROW.markdown() == (
      '| `ppo_cartpole` `--config.num_shards=2` | CartPole-v1 | 1,000 | 3 | 2.000 (1.000 to 3.000) '
      '| 1.000 | 3.000 | greedy, 20 episodes | 12 s | abc, 2026-11-28, EPYC |  |')
  assert ', 2026-11-28, Intel Xeon |' in ROW._replace(
      processor='Intel(R) Xeon(R) Processor').markdown()
  assert ROW._replace(flags='--config.env.task=CartPole-v1').markdown().startswith(
      '| `ppo_cartpole` | CartPole-v1 |')


def test_new_rows_replace_old_ones_of_the_same_command(tmp_path):
  old = [ROW._replace(published='475, RL Zoo'), ROW._replace(config='b')]
  new = [ROW._replace(returns='4 5 6'), ROW._replace(config='c')]
  whole = results.merged(old, new)
  assert whole == [ROW._replace(returns='4 5 6', published='475, RL Zoo'), *old[1:], new[1]]
  results.write(tmp_path / 'results.csv', whole)
  assert results.read(tmp_path / 'results.csv') == whole
  assert results.read(tmp_path / 'none.csv') == []


def test_the_table_of_the_page_is_replaced(tmp_path):
  page = tmp_path / 'results.md'
  page.write_text(f'# Results\n\n{results.HEADER}\n| old |\n| older |\n\n| another | table |\n')
  results.write(tmp_path / 'results.csv', [ROW])
  assert page.read_text() == (
      f'# Results\n\n{results.HEADER}\n{ROW.markdown()}\n\n| another | table |\n')
  page.write_text('# Results\n\n| another | table |\n')
  with pytest.raises(ValueError, match=r'results.md: has no table that begins with .*config'):
    results.write(tmp_path / 'results.csv', [ROW])


def test_rows_of_real_runs_and_one_trained_again(tmp_path):
  for seed in (1, 2):
    done = processes.run([sys.executable, '-m', 'podracer_jit', '--config=impala_catch:smoke',
                          f'--config.seed={seed}', f'--workdir={tmp_path / "runs" / str(seed)}'])
    assert done.returncode == 0, done.stderr
  table = tmp_path / 'results.csv'
  rows = run_benchmark('results', f'--table={table}', 'rows', str(tmp_path / 'runs'))
  assert rows.returncode == 0, rows.stderr
  (row,) = results.read(table)
  assert row.key == ('impala_catch:smoke', 'Catch-v0', '')
  assert row.seeds == '1 2' and row.protocol == 'training' and row.values.shape == (2,)
  assert row.markdown() in rows.stdout

  results.write(table, [row._replace(returns='-1 1')])  # almost everything is expected
  done = run_benchmark('results', f'--table={table}', 'again', f'--folder={tmp_path / "again"}')
  assert done.returncode == 0, done.stderr
  assert 'impala_catch:smoke on Catch-v0, seed 3: ' in done.stdout and ' is within ' in done.stdout
  # The workdir is finished, so it is only compared.
  results.write(table, [row._replace(returns='50 50')])
  done = run_benchmark('results', f'--table={table}', 'again', f'--folder={tmp_path / "again"}')
  assert done.returncode == 1 and ' is NOT within 50.00 to 50.00' in done.stdout


def test_a_row_of_an_example_is_trained_and_evaluated_again(tmp_path):
  """Evaluations of a config with modules of its own must be allowed to import them."""
  row = ROW._replace(config='examples/vmpo.py:smoke', flags='', returns='-1e6 0 1e6')
  table = tmp_path / 'results.csv'
  results.write(table, [row])
  done = run_benchmark('results', f'--table={table}', 'again', f'--folder={tmp_path / "again"}')
  assert done.returncode == 0, done.stderr
  assert 'examples/vmpo.py:smoke on CartPole-v1, seed 4: ' in done.stdout


@pytest.mark.parametrize('args, message', [
    (['rows', 'nowhere'], 'nowhere: does not exist'),
    (['again', '--row=xyz'], '--row: there is no row xyz; the file has ')])
def test_wrong_arguments_are_refused(args, message):
  done = run_benchmark('results', *args)
  assert done.returncode == 2 and message in done.stderr and 'Traceback' not in done.stderr


def test_the_page_has_each_row_as_it_is_in_the_file():
  page = (ROOT / 'docs' / 'results.md').read_text()
  rows = results.read(results.TABLE)
  assert rows
  for row in rows:
    assert row.markdown() in page.splitlines(), row
