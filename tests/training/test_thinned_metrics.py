"""Runs whose metrics have fewer lines: the receipts stay, and nothing is taken for a gap."""

import json

import pytest

from podracer_jit.workdir import journal
from tests.runs import TIMES, StopAt, changed, open_workdir, prepared, small, train_in

CONFIG = changed(small(), total_steps=700, checkpoint__every_updates=4, log__every_updates=3,
                 log__window=1)


def lines(workdir):
  return [{name: value for name, value in line.items() if name not in TIMES}
          for line in journal.read_lines(workdir / journal.METRICS)]


def train(workdir, config, *callbacks):
  run = prepared(config)
  open_workdir(workdir, run.experiment.fields)
  return train_in(run, workdir, callbacks)


@pytest.mark.quick
def test_lines_are_those_of_each_third_update_and_cover_all_episodes(tmp_path):
  records = []
  assert train(tmp_path / 'whole', CONFIG, lambda record: records.append(record))
  assert train(tmp_path / 'all', changed(CONFIG, log__every_updates=1))
  whole, every = lines(tmp_path / 'whole'), lines(tmp_path / 'all')
  last = len(records)
  assert last > 6 and [line['update'] for line in whole] == sorted({*range(3, last, 3), last})
  receipts = [journal.read_receipts(tmp_path / name) for name in ('whole', 'all')]
  assert receipts[0].by_update == receipts[1].by_update and not receipts[0].problems
  assert {header.get(journal.EVERY) for header in receipts[0].headers} == {3}
  assert not any(journal.EVERY in header for header in receipts[1].headers)

  # What is no statistic of episodes is that of its own update.
  of_episodes = ('episode_return', 'episode_length')
  by_update = {line['update']: line for line in every}
  for line in whole:
    assert {name: value for name, value in line.items() if name not in of_episodes} == {
        name: value for name, value in by_update[line['update']].items()
        if name not in of_episodes}

  # A run that stops between two lines, and goes on, has the same lines.
  assert not train(tmp_path / 'stopped', CONFIG, StopAt(4))
  assert [line['update'] for line in lines(tmp_path / 'stopped')] == [3]
  assert train(tmp_path / 'stopped', CONFIG)
  assert lines(tmp_path / 'stopped') == whole
  assert journal.read_receipts(tmp_path / 'stopped').by_update == receipts[0].by_update


def test_a_run_that_goes_on_with_another_interval_has_no_gap(tmp_path):
  assert not train(tmp_path, CONFIG, StopAt(4))
  # Without the prefix of the checkpoint, the lines themselves are looked at.
  path = tmp_path / 'checkpoints' / '4' / 'meta' / 'metadata'
  assert train(tmp_path, changed(CONFIG, log__every_updates=1))
  updates = [line['update'] for line in lines(tmp_path)]
  assert updates == [3, *range(5, updates[-1] + 1)]
  assert journal.cut(tmp_path, tmp_path / journal.METRICS, updates[-1]) == []
  assert json.loads(path.read_text())['unlogged'][0] >= 0
