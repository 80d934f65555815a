"""Receipts and metrics with lines that are missing, garbled or half written."""

import hashlib
import json
import shutil
import tracemalloc

import pytest

from podracer_jit.workdir import journal


def write(path, *entries):
  path.write_text(''.join(
      entry if isinstance(entry, str) else json.dumps(entry) + '\n' for entry in entries))


def receipt(update):
  return dict(update=update, batch='0' * 16, params=f'{update:016x}')


def header(segment, first_update):
  return dict(segment=segment, first_update=first_update, versions={})


def test_only_lines_after_the_checkpoint_are_cut(tmp_path):
  path = tmp_path / journal.RECEIPTS
  before = [header(0, 1), receipt(1), receipt(2), header(1, 3), receipt(3)]
  write(path, *before, header(2, 4), receipt(4), '{"update": 5, "ba')
  assert journal.cut(tmp_path, path, 3) == []
  assert [json.loads(line) for line in path.read_text().splitlines()] == before
  assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def prefix_of(path):
  return journal.Prefix(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_file_that_begins_as_the_checkpoint_says_is_cut_without_a_look_at_its_lines(tmp_path):
  path = tmp_path / journal.RECEIPTS
  write(path, header(0, 1), receipt(1), 'garbage\n')
  before = path.read_bytes()
  shutil.copy(path, tmp_path / journal.METRICS)
  prefixes = journal.Prefixes(tmp_path)
  names = [journal.RECEIPTS, journal.METRICS]
  assert prefixes.now(names) == {name: prefix_of(path) for name in names}
  prefix = prefix_of(path)
  with path.open('a') as file:
    file.write(json.dumps(receipt(2)) + '\n{"upd')
  assert prefixes.now(names)[path.name] == prefix_of(path) != prefix
  assert journal.cut(tmp_path, path, 1, prefix) == []
  assert path.read_bytes() == before


@pytest.mark.parametrize('old, new', [
    ('"update": 2', '"update": 3'), ('"batch": "0', '"batch": "1')])
def test_a_changed_digit_is_found_and_the_file_is_kept(old, new, tmp_path):
  path = tmp_path / journal.RECEIPTS
  write(path, header(0, 1), receipt(1), receipt(2))
  prefix = prefix_of(path)
  changed = path.read_text().replace(old, new)
  path.write_text(changed)
  (note,) = journal.cut(tmp_path, path, 2, prefix)
  kept = tmp_path / 'broken' / path.name
  words = 'no line of 2' if 'update' in old else 'it is not what was written up to update 2'
  assert note == f'{path}: {words}; the file as it was is now {kept}'
  assert kept.read_text() == changed


def test_a_file_that_has_lost_its_end_is_reported(tmp_path):
  path = tmp_path / journal.METRICS
  write(path, dict(update=1), dict(update=2))
  prefix = prefix_of(path)
  write(path, dict(update=1))
  (note,) = journal.cut(tmp_path, path, 2, prefix)
  assert note.startswith(f'{path}: no line of 2; ')


def test_garbled_and_missing_lines_are_reported_and_the_file_is_kept(tmp_path):
  path = tmp_path / journal.METRICS
  write(path, dict(update=1), '\x00\x00\n', dict(update=3), '[3]\n', dict(update='4'),
        dict(update=6), dict(update=7))
  before = path.read_bytes()
  (note,) = journal.cut(tmp_path, path, 6)
  kept = tmp_path / 'broken' / path.name
  assert note == f'{path}: 3 garbled lines; no line of 2, 4 to 5; the file as it was is now {kept}'
  assert kept.read_bytes() == before
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
      dict(update=1), dict(update=3), dict(update=6)]


def test_a_kill_while_a_file_is_replaced_loses_no_line(tmp_path, monkeypatch):
  path = tmp_path / journal.METRICS
  write(path, dict(update=1), 'garbage\n', dict(update=2), dict(update=3))

  def killed(*paths):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    rename = journal.files.rename
    patched.setattr(journal.files, 'rename',
                    lambda old, new: (killed if new == path else rename)(old, new))
    journal.cut(tmp_path, path, 2)
  assert not path.exists()
  assert journal.cut(tmp_path, path, 2) == []
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
      dict(update=1), dict(update=2)]
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ['broken', path.name]


@pytest.mark.parametrize('last, message', [(0, []), (5, ['with all updates up to 5'])])
def test_a_missing_file_is_reported_if_it_should_exist(tmp_path, last, message):
  notes = journal.cut(tmp_path, tmp_path / journal.METRICS, last)
  assert len(notes) == len(message) and all(a in b for a, b in zip(message, notes, strict=True))


def test_missing_lines_at_the_end_are_reported(tmp_path):
  path = tmp_path / journal.METRICS
  write(path, dict(update=1), dict(update=2))
  assert journal.cut(tmp_path, path, 4) == [f'{path}: no line of 3 to 4']


@pytest.mark.parametrize('updates, missing', [
    ((1, 2, 3, 6, 9, 10, 11), ''), ((1, 2, 3, 9, 10, 11), 'no line of 6'),
    ((1, 3, 10, 11), 'no line of 2, 6 to 9'), ((1, 2, 3, 6, 7, 9, 10), 'no line of 11'),
    ((1, 2, 3, 6, 8, 9, 10, 11), '')])
def test_metrics_lack_no_lines_that_their_interval_leaves_out(updates, missing, tmp_path):
  """Updates 1 to 2 have lines, then each third, then from 10 on all again."""
  write(tmp_path / journal.RECEIPTS, header(0, 1), receipt(1),
        header(1, 3) | {journal.EVERY: 3}, header(2, 6) | {journal.EVERY: 3}, header(3, 10))
  path = tmp_path / journal.METRICS
  write(path, *(dict(update=update) for update in updates))
  assert journal.cut(tmp_path, path, 11) == ([f'{path}: {missing}'] if missing else [])


def test_receipts_of_two_simultaneous_runs_are_separated(tmp_path):
  """Before workdirs had locks, two runs could write to the same one."""
  path = tmp_path / journal.RECEIPTS
  write(path, receipt(1), receipt(5), receipt(2), receipt(6))
  journal.cut(tmp_path, path, 2)
  assert [json.loads(line)['update'] for line in path.read_text().splitlines()] == [1, 2]


def test_reading_receipts_reports_missing_lines(tmp_path):
  write(tmp_path / journal.RECEIPTS, header(0, 1), receipt(1), 'garbage\n', receipt(3),
        dict(update=4, batch=7), '{"update": 5')
  headers, by_update, problems = journal.read_receipts(tmp_path)
  assert len(headers) == 1 and sorted(by_update) == [1, 3]
  assert problems == ['2 garbled lines', 'no line of 2']


def test_a_long_file_is_cut_with_little_memory(tmp_path):
  path = tmp_path / journal.METRICS
  with path.open('w') as file:
    file.writelines(f'{{"update": {update}, "x": "{"x" * 100}"}}\n' for update in range(1, 50_001))
  tracemalloc.start()
  assert journal.cut(tmp_path, path, 49_000) == []
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 500_000 < path.stat().st_size
