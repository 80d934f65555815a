"""Workdirs of earlier code are resumed, or refused by one line; `tests.workdirs.make` has them.

On a machine that computes like the one where they were made, a resumed run writes the receipts that
the earlier code wrote. Those of 0.7.0 are of commit 6574384, before the algorithms were rewritten;
that of 0.9.0 is of commit f84498c, which had a replay for each gradient group.
"""

import functools
import json
import re
import shutil
import sys
from typing import NamedTuple

import pytest

from podracer_jit.workdir import checkpoints, record
from tests import processes
from tests.tiers import essential
from tests.workdirs import make


class Outcome(NamedTuple):
  """Fate of an old workdir: it is resumed, unless `refused` has words of the message."""

  refused: str = ''
  same_bits: bool = True  # False if a later version computes differently, as CHANGELOG.md says
  note: str = ''  # words of a line that tells what begins anew


# By the folder under tests/workdirs.
OUTCOMES = {
    'v0_6_0/changed': Outcome(),
    'v0_6_0/dict_of_boxes': Outcome(same_bits=False),
    'v0_6_0/dict_with_discrete': Outcome(refused='a number (Discrete) in a dict is a one-hot now'),
    'v0_6_0/fifo_replay': Outcome(),
    'v0_6_0/gymnax': Outcome(same_bits=False),
    'v0_6_0/inherited': Outcome(),
    'v0_6_0/moments': Outcome(same_bits=False),
    'v0_6_0/own_jax': Outcome(same_bits=False),
    'v0_6_0/prioritised_replay': Outcome(),
    'v0_6_0/recurrent': Outcome(),
    'v0_6_0/two_processes': Outcome(same_bits=False),
    'v0_7_0/jax_replay': Outcome(),
    'v0_7_0/moments': Outcome(same_bits=False),
    'v0_7_0/prioritised_replay': Outcome(),
    'v0_9_0/grouped_replay': Outcome(same_bits=False, note='the one of all begins empty'),
}
RESUMED = [name for name, outcome in OUTCOMES.items() if not outcome.refused]
REFUSED = [name for name, outcome in OUTCOMES.items() if outcome.refused]


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def by_update(entries):
  return {line['update']: (line['batch'], line['params']) for line in entries if 'update' in line}


def headers(entries):
  return [line for line in entries if 'segment' in line]


# Prints the canary as versions until 0.8 computed it, with the 16 threads that all their runs had.
OLD_CANARY = """
import os
os.environ['NPROC'] = '16'
from podracer_jit.numerics import fingerprints
fingerprints.independent_of_threads = lambda closed: closed
print(fingerprints.canary())
"""


@functools.cache
def old_canary():
  done = processes.run([sys.executable, '-P', '-c', OLD_CANARY])
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()


def computes_alike(header, old):
  """Returns whether the old code would have these bits here.

  Args:
    header: of a segment of today's code, in its receipts.
    old: of a segment of the old code.
  """
  ours = {'podracer_jit': None, 'python': None}
  return (old_canary(), header['versions'] | ours) == (old['canary'], old['versions'] | ours)


def resume(name, workdir):
  """Goes on with a copy of an old workdir; returns the completed processes."""
  run = name.partition('/')[2]
  shutil.copytree(make.FOLDER / name, workdir)
  flags = make.flags_of(run, workdir, make.RUNS[run].flags)
  count = make.RUNS[run].processes
  return processes.together(count, *flags) if count > 1 else [
      processes.run(processes.command(*flags))]


def test_the_table_names_all_workdirs():
  folders = {f'{path.parent.name}/{path.name}' for path in make.FOLDER.glob('v*/*')
             if path.is_dir()}
  assert set(OUTCOMES) == folders


@pytest.mark.parametrize('name', OUTCOMES)
def test_checkpoints_are_as_they_were_saved(name):
  """Git has changed no line ending and left out no file."""
  workdir = make.FOLDER / name
  updates = checkpoints.saved_updates(workdir)
  assert updates and not any(checkpoints.problem(workdir, update) for update in updates)


@pytest.mark.parametrize('name', OUTCOMES)
def test_no_workdir_names_a_folder_of_its_maker(name):
  """Orbax writes the temporary folder, and so does a run that begins with another run."""
  files = [path for path in (make.FOLDER / name).rglob('*') if path.is_file()]
  paths = {path for file in files
           for path in re.findall(rb'/(?:home|opt|root|tmp|work|Users)/[\w.-]+', file.read_bytes())}
  assert all(path.startswith(b'/tmp/workdirs-') for path in paths), paths


@pytest.mark.parametrize('name', essential(
    RESUMED, 'v0_6_0/own_jax', 'v0_6_0/moments', 'v0_7_0/jax_replay', 'v0_7_0/moments',
    'v0_7_0/prioritised_replay', 'v0_9_0/grouped_replay'))
def test_an_old_workdir_is_resumed(tmp_path, name):
  """Bits are those of the old code, if this machine and its libraries compute alike."""
  old = make.FOLDER / name
  workdir = tmp_path / 'run'
  results = resume(name, workdir)
  assert [result.returncode for result in results] == [0] * len(results), results
  stored = json.loads((old / 'config.json').read_text())['versions']
  output = results[0].stdout + (results[0].stderr or '')
  for package, version in record.versions().items():
    if stored.get(package) != version:
      assert (f'{package} was {stored.get(package)} when this run began and is {version} now: '
              'results go on, but perhaps not to the last bit') in output
  assert OUTCOMES[name].note in output
  before = lines(old / 'receipts.jsonl')
  after = lines(old.with_suffix('.jsonl'))
  receipts = lines(workdir / 'receipts.jsonl')
  assert receipts[:len(before)] == before
  # What begins anew begins with a header.
  begun = [{}] if OUTCOMES[name].note else []
  assert [line.get('update') for line in receipts] == [
      line.get('update') for line in before + begun + after]
  assert [line['update'] for line in lines(workdir / 'metrics.jsonl')] == list(by_update(receipts))
  assert checkpoints.saved_updates(workdir)[-1] == max(by_update(after))
  assert not (workdir / 'broken').exists()
  if OUTCOMES[name].same_bits and computes_alike(headers(receipts)[-1], headers(after)[-1]):
    assert by_update(receipts) == by_update(before + after)


@pytest.mark.quick
@pytest.mark.parametrize('name', REFUSED)
def test_an_old_workdir_is_refused_by_one_line(tmp_path, name):
  workdir = tmp_path / 'run'
  results = resume(name, workdir)
  for result in results:
    output = result.stdout + (result.stderr or '')
    assert result.returncode == 2, output
    assert output.startswith('podracer_jit: ') and output.count('\n') == 1, output
    assert OUTCOMES[name].refused in output
  config = (workdir / 'config.json').read_text()
  assert config == (make.FOLDER / name / 'config.json').read_text()
