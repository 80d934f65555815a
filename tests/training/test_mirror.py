"""Copies of workdirs in stores: real folders as stores, real trainings, kills and failures."""

import filecmp
import json
import os
import shutil
import signal
import sys
import time

import fsspec
import pytest

from podracer_jit.errors import NotSaved
from podracer_jit.training import mirror, sinks
from podracer_jit.workdir import checkpoints
from tests import processes
from tests.runs import changed, prepared, small, train

# In the store, but not in the workdir.
OWN = {mirror.INDEX, mirror.HOLDER}


def command(workdir, store, *more):
  return [sys.executable, '-m', 'podracer_jit', '--config=impala_catch:smoke',
          '--config.checkpoint.every_updates=2', f'--workdir={workdir}', f'--mirror={store}', *more]


def assert_equal_folders(a, b):
  compared = filecmp.dircmp(a, b, ignore=[*OWN, 'lock'])
  assert not compared.left_only and not compared.right_only and not compared.diff_files
  for name in compared.common_dirs:
    assert_equal_folders(a / name, b / name)


def trained(workdir, updates=4):
  """Trains a small run of so many updates in a workdir; returns the workdir."""
  # An update has 64 rows, and fewer valid ones.
  config = changed(small(), total_steps=60 * updates - 50, checkpoint__every_updates=2)
  assert train(prepared(config), workdir)
  return workdir


def begun(url, workdir):
  """Returns a mirror whose training has begun."""
  copy = mirror.Mirror(url, workdir)
  copy.begin(None)
  return copy


def save(copy, workdir):
  """Tells a mirror of the workdir's newest checkpoint, and waits until it is copied."""
  updates = checkpoints.saved_updates(workdir)
  copy.saved(sinks.Saved(workdir, max(updates), 0, None))
  assert copy.keeps() in (updates, ())
  copy._copying.exception()


def test_a_copy_is_the_workdir_and_the_same_command_fetches_it(tmp_path):
  workdir, store = tmp_path / 'w', tmp_path / 'bucket' / 'run'
  done = processes.run(command(workdir, f'file://{store}'))
  assert done.returncode == 0, done.stderr
  assert_equal_folders(workdir, store)
  assert OWN <= set(os.listdir(store))

  workdir.rename(tmp_path / 'before')
  done = processes.run(command(workdir, f'file://{store}'))
  assert done.returncode == 0, done.stderr
  assert f'{workdir} was fetched from file://{store}, as update 9 left it' in done.stderr
  assert_equal_folders(workdir, tmp_path / 'before')


def test_a_killed_run_goes_on_elsewhere_to_the_same_bits(tmp_path):
  store = f'file://{tmp_path / "store"}'
  steps = '--config.total_steps=60000'
  process = processes.Popen(command(tmp_path / 'killed', store, steps))
  index = tmp_path / 'store' / mirror.INDEX
  until = time.monotonic() + 300
  while not index.exists() or json.loads(index.read_text() or '{"update": 0}')['update'] < 6:
    assert process.poll() is None and time.monotonic() < until
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  shutil.rmtree(tmp_path / 'killed')

  for name, more in (('elsewhere', [store]), ('whole', [f'file://{tmp_path / "other"}'])):
    done = processes.run(command(tmp_path / name, *more, steps))
    assert done.returncode == 0, done.stderr
  compared = processes.run([sys.executable, '-m', 'podracer_jit', 'compare',
                            str(tmp_path / 'elsewhere'), str(tmp_path / 'whole')])
  assert compared.returncode == 0 and 'identical' in compared.stdout


def test_a_copy_that_was_cut_short_leaves_the_one_before(tmp_path, monkeypatch):
  workdir = trained(tmp_path / 'w')
  url = 'memory://runs/cut'
  copy = begun(url, workdir)
  save(copy, workdir)
  trained(tmp_path / 'longer', updates=8)
  shutil.rmtree(workdir)
  (tmp_path / 'longer').rename(workdir)

  store = fsspec.filesystem('memory')
  created = copy._created
  names = []

  def failing(name):
    names.append(name)
    if len(names) == 8:
      raise ConnectionError('the network is gone')
    return created(name)

  monkeypatch.setattr(copy, '_created', failing)
  save(copy, workdir)
  assert isinstance(copy._copying.exception(), ConnectionError)
  monkeypatch.undo()
  assert json.loads(store.cat_file('/runs/cut/mirror.json'))['update'] == 4
  fetched = tmp_path / 'fetched'
  mirror.Mirror(url, fetched)
  assert checkpoints.newest_whole(fetched) == 4
  # Journals have the lines of the copy, and no more.
  sizes = json.loads(store.cat_file('/runs/cut/mirror.json'))['files']
  assert (fetched / 'receipts.jsonl').stat().st_size == sizes['receipts.jsonl']

  save(copy, workdir)  # makes it up
  assert copy._copying.exception() is None
  newest = max(checkpoints.saved_updates(workdir))
  assert json.loads(store.cat_file('/runs/cut/mirror.json'))['update'] == newest > 4
  copy.close()
  index = json.loads(store.cat_file('/runs/cut/mirror.json'))
  stored = {name.removeprefix('/runs/cut/') for name in store.find('/runs/cut')}
  assert stored == set(index['files']) | OWN


def test_a_run_that_goes_on_from_a_checkpoint_leaves_the_copy_before(tmp_path):
  """Its journals are shorter than the copy's, until it is as far again."""
  workdir = trained(tmp_path / 'w')
  metrics = workdir / 'metrics.jsonl'
  saved = metrics.read_bytes()
  metrics.write_bytes(saved + b'{"update": 5}\n' * 100)  # it has failed after its checkpoint
  url = 'memory://runs/shorter'
  begun(url, workdir).close()
  metrics.write_bytes(saved)  # it went on, and copied this file, but not the whole copy
  fsspec.filesystem('memory').pipe_file('/runs/shorter/metrics.jsonl', saved)
  fetched = tmp_path / 'fetched'
  mirror.Mirror(url, fetched)
  config = changed(small(), total_steps=190, checkpoint__every_updates=2)
  assert train(prepared(config), fetched)
  assert [json.loads(line)['update'] for line in (fetched / 'metrics.jsonl').open()] == [1, 2, 3, 4]


def test_files_that_other_commands_replace_do_not_end_a_copy(tmp_path):
  workdir = trained(tmp_path / 'w')
  (workdir / 'videos').mkdir()
  draft = workdir / 'videos' / '4.tmp.mp4'
  draft.write_bytes(b'half')
  replaced = workdir / 'evaluation.json'
  replaced.write_text('{}')
  copy = begun('memory://runs/replaced', workdir)
  sizes = dict(copy._sizes())
  assert 'evaluation.json' in sizes and not any('.tmp' in name for name in sizes)
  replaced.unlink()
  copy._copy(4, sizes)
  store = fsspec.filesystem('memory')
  index = json.loads(store.cat_file('/runs/replaced/mirror.json'))
  assert set(index['files']) == set(sizes) - {'evaluation.json'}
  (checkpoint,) = [name for name in sizes if name.startswith('checkpoints/4/meta/')][:1]
  (workdir / checkpoint).unlink()
  copy._copied.clear()
  with pytest.raises(FileNotFoundError, match='checkpoints/4'):
    copy._copy(4, sizes)


def test_a_copy_may_take_longer_than_the_time_between_checkpoints(tmp_path, monkeypatch):
  copied = mirror.Mirror._copy_file
  took = []

  def slow(self, name, size):
    if not took and name.startswith('checkpoints/'):  # of the first copy with two checkpoints
      whole = checkpoints.saved_updates(self._workdir)
      if len(whole) == 2:
        took.append(whole)
        until = time.monotonic() + 60
        while len(set(checkpoints.saved_updates(self._workdir)) - set(whole)) < 3:
          assert time.monotonic() < until
          time.sleep(0.01)
    return copied(self, name, size)

  monkeypatch.setattr(mirror.Mirror, '_copy_file', slow)
  failed = []
  monkeypatch.setattr(mirror, 'complain', failed.append)
  url = f'file://{tmp_path / "store"}'
  config = changed(small(), total_steps=1200, checkpoint__every_updates=1, checkpoint__keep=1)
  workdir = tmp_path / 'w'
  assert train(prepared(config), workdir, callbacks=[mirror.Mirror(url, workdir)])
  assert took and not failed


def test_an_older_command_ends_when_a_newer_one_has_taken_the_copy_over(tmp_path):
  workdir = trained(tmp_path / 'w')
  older = begun('memory://runs/taken', workdir)
  save(older, workdir)
  newer = begun('memory://runs/taken', tmp_path / 'fetched')
  save(older, workdir)
  with pytest.raises(NotSaved, match=f'process {os.getpid()} on .* has taken memory://runs/taken '
                     f'over since .*; this run ends, and {workdir} has all of it'):
    save(older, workdir)
  with pytest.raises(NotSaved, match='has taken'):
    older.close()
  newer.close()


def test_what_a_killed_copy_has_not_removed_goes_with_the_next_one(tmp_path, monkeypatch):
  workdir, store = trained(tmp_path / 'w'), tmp_path / 'store'
  (workdir / 'old.txt').write_text('')
  copy = begun(f'file://{store}', workdir)
  copy._copy(4, dict(copy._sizes()))
  (workdir / 'old.txt').unlink()

  def killed(path, recursive):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(copy._store, 'rm', killed)
    with pytest.raises(KeyboardInterrupt):
      copy._copy(4, dict(copy._sizes()))
  assert (store / 'old.txt').exists()
  for _ in range(2):
    copy._copy(4, dict(copy._sizes()))
    assert_equal_folders(workdir, store)
  copy.close()


def test_a_copy_that_fails_at_the_end_is_an_error(tmp_path, monkeypatch):
  workdir = trained(tmp_path / 'w')
  copy = begun('memory://runs/full', workdir)

  def failing(name):
    raise OSError(28, 'No space left')

  monkeypatch.setattr(copy, '_created', failing)
  with pytest.raises(NotSaved, match='No space left; .* has all of the run, and the same command '
                     'copies it'):
    copy.close()


def test_a_finished_run_whose_copy_had_failed_is_copied(tmp_path):
  workdir, store = trained(tmp_path / 'w'), tmp_path / 'store'
  copy = mirror.Mirror(f'file://{store}', workdir)
  copy.close()  # a training with no segment left begins no sink
  assert_equal_folders(workdir, store)
  holder = (store / mirror.HOLDER).read_text()
  mirror.Mirror(f'file://{store}', workdir).close()  # the copy has it all
  assert (store / mirror.HOLDER).read_text() == holder
  (tmp_path / 'empty').mkdir()
  mirror.Mirror('memory://runs/none', tmp_path / 'empty').close()  # no run has begun
  assert not fsspec.filesystem('memory').exists('/runs/none')


def test_a_broken_copy_is_one_line_and_leaves_nothing_behind(tmp_path):
  store = fsspec.filesystem('memory')
  for name, index, message in (
      ('headless', dict(run='', update=1), "^--mirror: memory://runs/headless: KeyError: 'files'$"),
      ('gone', dict(run='', update=1, files={'metrics.jsonl': 1}),
       '^--mirror: memory://runs/gone: FileNotFoundError: ')):
    store.pipe_file(f'/runs/{name}/mirror.json', json.dumps(index).encode())
    with pytest.raises(ValueError, match=message):
      mirror.Mirror(f'memory://runs/{name}', tmp_path / 'w')
  assert not os.listdir(tmp_path)


def test_what_does_not_fit_is_refused(tmp_path):
  workdir = trained(tmp_path / 'w')
  for url, message in (
      ('store', '^--mirror: must be the address of a store, such as gs://bucket/runs/x, got store'),
      ('nope://x/y', '^--mirror: nope://x/y: ValueError: Protocol not known'),
      ('gs://x/y', '^--mirror: gs://x/y: ImportError: Please install gcsfs')):
    with pytest.raises(ValueError, match=message):
      mirror.Mirror(url, workdir)

  url = 'memory://runs/fit'
  copy = begun(url, workdir)
  save(copy, workdir)
  trained(tmp_path / 'older', updates=2)
  with pytest.raises(ValueError, match=f'{url} has update 4, and .*older only update 2; remove or '
                     'rename .*older, and the same command fetches the copy$'):
    mirror.Mirror(url, tmp_path / 'older')
  other = tmp_path / 'other'
  assert train(prepared(changed(small(), total_steps=100, seed=5)), other)
  with pytest.raises(ValueError, match='is the copy of another run than that in .*other; choose'):
    mirror.Mirror(url, other)
  full = tmp_path / 'full'
  full.mkdir()
  (full / 'mine.txt').write_text('')
  with pytest.raises(ValueError, match='full is no workdir and not empty'):
    mirror.Mirror(url, full)
  assert os.listdir(full) == ['mine.txt']


def test_a_strangers_index_writes_nothing_outside_of_the_workdir(tmp_path):
  store = fsspec.filesystem('memory')
  store.pipe_file('/runs/bad/mirror.json', json.dumps(
      dict(run='', update=1, files={'../../outside.txt': 1})).encode())
  store.pipe_file('/runs/outside.txt', b'x')
  with pytest.raises(ValueError, match='names ../../outside.txt, outside of the copy'):
    mirror.Mirror('memory://runs/bad', tmp_path / 'w')
  assert not list(tmp_path.rglob('outside.txt')) and not (tmp_path / 'w').exists()


@pytest.mark.parametrize('more', ['--num_seeds=2', '--distributed'])
def test_several_seeds_or_processes_are_refused(tmp_path, more):
  done = processes.run(command(tmp_path / 'w', f'file://{tmp_path / "store"}', more))
  assert done.returncode == 2 and '--mirror: is for one process and one seed' in done.stderr
