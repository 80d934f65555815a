"""Broken checkpoints are detected and set aside, and the run resumes from the one before."""

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from podracer_jit.errors import OtherExperiment
from podracer_jit.experiment.build import Snapshot
from podracer_jit.play import evaluation
from podracer_jit.workdir import checkpoints, files, journal
from tests import made, runs
from tests.runs import changed, fresh, open_workdir, prepared, small

UPDATES = 6
CONFIG = changed(small(), total_steps=10**6, env__renew_every_updates=2,
                 checkpoint__every_updates=2, log__tensorboard=False)


def train_in(workdir, updates=UPDATES):
  """Trains as the command does, in a new or a used workdir; returns the notes for the user."""
  run = prepared(CONFIG)
  notes = open_workdir(workdir, run.experiment.fields)
  if checkpoints.newest_whole(workdir) != updates:
    runs.train_in(run, workdir, [runs.StopAt(updates)])
  return notes


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  return made.once(tmp_path_factory, 'whole', train_in)


@pytest.fixture
def copy(uninterrupted, tmp_path):
  """A copy of a run with the checkpoints of updates 2, 4 and 6."""
  workdir = tmp_path / 'run'
  shutil.copytree(uninterrupted, workdir)
  return workdir


def receipts(workdir):
  return journal.read_receipts(workdir).by_update


def break_file(path, how):
  content = path.read_bytes()
  path.write_bytes({'truncated': content[:-1], 'emptied': b'', 'longer': content + b' ',
                    'zeroed': bytes(len(content))}[how])


def largest_file(workdir, update):
  paths = (path for path in (workdir / 'checkpoints' / str(update)).rglob('*') if path.is_file())
  return max(paths, key=lambda path: path.stat().st_size)


def test_a_run_in_which_no_episode_ends_says_so_once(tmp_path, capsys):
  """An episode of Pendulum has 200 steps, and a segment 16; JAX functions go on over segments."""
  for task, words in (
      ('Pendulum-v1', 'after 16 steps of each (env.renew_every_updates = 2), and longer '
       'episodes never end; episodes of 200 steps need env.renew_every_updates = 25 or more'),
      ('gymnax:Pendulum-v1', '')):
    run = fresh(changed(small('ppo', task), total_steps=10**6, env__renew_every_updates=2,
                        checkpoint__every_updates=2, log__tensorboard=False))
    workdir = tmp_path / task
    open_workdir(workdir, run.experiment.fields)
    runs.train_in(run, workdir, [runs.StopAt(2)])
    assert 'no episode' not in capsys.readouterr().out
    runs.train_in(run, workdir, [runs.StopAt(8)])
    out = capsys.readouterr().out
    assert out.count('warning: no episode has ended yet') == bool(words) and words in out


def test_metrics_and_receipts_reach_the_disk_before_a_checkpoint_is_complete(tmp_path,
                                                                            monkeypatch):
  """Otherwise a power failure could leave a checkpoint without the lines of its updates."""
  sync, rename = os.fsync, os.rename
  on_disk = {}  # bytes of each file, when it was last synced
  complete = []

  def note_sync(descriptor):
    sync(descriptor)
    on_disk[os.readlink(f'/proc/self/fd/{descriptor}')] = os.fstat(descriptor).st_size

  def note_rename(source, target, **kwargs):
    rename(source, target, **kwargs)
    if Path(target).parent.name == 'checkpoints' and Path(target).name.isdigit():
      complete.append(Path(target).name)
      assert (Path(target) / checkpoints.MANIFEST).stat().st_size > 0
      assert str(tmp_path) in on_disk  # the names of the files
      for name in ('metrics.jsonl', 'receipts.jsonl'):
        assert on_disk.get(str(tmp_path / name)) == (tmp_path / name).stat().st_size > 0

  monkeypatch.setattr(os, 'fsync', note_sync)
  monkeypatch.setattr(os, 'rename', note_rename)
  train_in(tmp_path)
  assert complete == ['2', '4', '6']


def test_all_of_a_checkpoint_reaches_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
  """A power failure after that would leave files empty that the kernel has not written."""
  synced = set()
  fsync = os.fsync
  rename = files.rename
  checked = []

  def note(descriptor):
    fsync(descriptor)
    synced.add(Path(os.readlink(f'/proc/self/fd/{descriptor}')))

  def check(draft, target):
    if target.parent.name == checkpoints.FOLDER:
      inside = {draft, *draft.rglob('*')}
      # Its content is synced before it gets its name.
      inside = {path.with_name(f'{path.name}.tmp') if path.name == checkpoints.MANIFEST else path
                for path in inside}
      checked.append(inside - synced)
    rename(draft, target)

  monkeypatch.setattr(os, 'fsync', note)
  monkeypatch.setattr(files, 'rename', check)
  train_in(tmp_path, 2)
  assert checked == [set()]


def test_every_random_flipped_bit_is_detected(copy):
  """Flips 74 bits, one at a time, in all files of a checkpoint and in its manifest."""
  rng = random.Random(1)
  run = prepared(CONFIG)
  like = run.initial_state()
  folder = copy / 'checkpoints' / '6'
  paths = sorted(path for path in folder.rglob('*') if path.is_file())
  weights = [path.stat().st_size for path in paths]
  with contextlib.closing(checkpoints.Checkpoints(copy)) as saved:
    saved.restore(like, 6)
    for _ in range(74):
      (path,) = rng.choices(paths, weights)
      content = bytearray(path.read_bytes())
      place = rng.randrange(len(content))
      bit = rng.randrange(8)
      content[place] ^= 1 << bit
      path.write_bytes(content)
      with pytest.raises(checkpoints.Broken):
        saved.restore(like, 6)
      content[place] ^= 1 << bit
      path.write_bytes(content)
    saved.restore(like, 6)


@pytest.mark.parametrize('how', ['truncated', 'emptied', 'zeroed', 'longer', 'missing'])
def test_a_broken_newest_checkpoint_is_set_aside_and_the_one_before_is_used(
    how, copy, uninterrupted):
  path = largest_file(copy, 6)
  if how == 'missing':
    path.unlink()
  else:
    break_file(path, how)
  (note,) = train_in(copy)
  assert note.startswith('the checkpoint of update 6 is broken (')
  assert note.endswith(f'); it is now {copy / "broken" / "6"}')
  assert path.name in note
  assert (copy / 'broken' / '6' / 'manifest.json').exists()
  assert receipts(copy) == receipts(uninterrupted) and len(receipts(copy)) == UPDATES
  assert checkpoints.newest_whole(copy) == 6
  assert journal.read_receipts(copy).problems == []


def test_a_changed_digit_of_the_metrics_is_found_at_the_next_start(copy, uninterrupted, capsys):
  path = copy / journal.METRICS
  first, *others = path.read_text().splitlines(keepends=True)
  record = json.loads(first)
  changed_text = json.dumps(record | {'sps': record['sps'] + 1}) + '\n' + ''.join(others)
  path.write_text(changed_text)
  with (copy / journal.RECEIPTS).open('a') as file:
    file.write('{"update": 7, "half a li')
  train_in(copy, UPDATES + 2)
  assert (f'{path}: it is not what was written up to update 6; the file as it was is now '
          f'{copy / "broken" / path.name}') in capsys.readouterr().out
  assert (copy / 'broken' / path.name).read_text() == changed_text
  assert [path.name for path in (copy / 'broken').iterdir()] == [path.name]
  assert len(journal.read_lines(path)) == len(receipts(copy)) == UPDATES + 2
  # The next checkpoint has the hash of the file as it is.
  train_in(copy, UPDATES + 4)
  assert 'not what was written' not in capsys.readouterr().out


def test_two_broken_checkpoints_are_set_aside(copy, uninterrupted):
  for update in (4, 6):
    break_file(largest_file(copy, update), 'zeroed')
  assert len(train_in(copy)) == 2
  assert receipts(copy) == receipts(uninterrupted)
  assert sorted(path.name for path in (copy / 'broken').iterdir()) == ['4', '6']


def test_if_all_checkpoints_are_broken_they_stay_and_the_run_is_refused(copy):
  for update in (2, 4, 6):
    break_file(largest_file(copy, update), 'truncated')
  before = sorted(copy.rglob('*'))
  with pytest.raises(ValueError, match='none of the checkpoints in') as refused:
    open_workdir(copy, CONFIG)
  message = str(refused.value)
  assert message.startswith('--workdir: ') and '\n' not in message
  assert '2: ' in message and '6: ' in message
  assert sorted(copy.rglob('*')) == before


def test_a_checkpoint_without_a_manifest_is_set_aside_or_the_run_is_refused(copy, uninterrupted):
  def without_a_manifest(update):
    (copy / 'checkpoints' / str(update) / checkpoints.MANIFEST).unlink()

  without_a_manifest(6)
  words = ('manifest.json is missing: it was cut, or saved by a version before 0.5, and '
           'podracer_jit 0.6 must resume the run once')
  (note,) = train_in(copy)
  assert words in note
  assert receipts(copy) == receipts(uninterrupted)
  for update in (2, 4, 6):
    without_a_manifest(update)
  before = sorted(copy.rglob('*'))
  with pytest.raises(ValueError, match=f'^--workdir: none of .* is whole .*6: {words}'):
    train_in(copy)
  assert sorted(copy.rglob('*')) == before


@pytest.mark.parametrize('kill_at', ['saved by Orbax', 'manifest', 'rename'])
def test_a_save_that_is_killed_leaves_no_checkpoint(kill_at, tmp_path, monkeypatch):
  state = prepared(CONFIG).initial_state()
  save, write, rename = ocp.Checkpointer.save, checkpoints.write_manifest, files.rename

  class Killed(BaseException):
    pass

  def killing(function, where):
    def call(*args, **kwargs):
      if where == kill_at:
        raise Killed
      function(*args, **kwargs)
      assert checkpoints.saved_updates(tmp_path) == [1] or where == 'rename'
    return call

  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    saved.save(Snapshot(state._replace(update=jnp.int32(1))), {})
    second = state._replace(update=jnp.int32(2))
    monkeypatch.setattr(ocp.Checkpointer, 'save', lambda self, *args, **kwargs: (
        save(self, *args, **kwargs), killing(lambda: None, 'saved by Orbax')()))
    monkeypatch.setattr(checkpoints, 'write_manifest', killing(write, 'manifest'))
    monkeypatch.setattr(files, 'rename', killing(rename, 'rename'))
    with pytest.raises(Killed):
      saved.save(Snapshot(second), {})
    folder = tmp_path / 'checkpoints'
    assert sorted(path.name for path in folder.iterdir()) == ['1', '2.saving']
    checkpoints.remove_unfinished(tmp_path)
    monkeypatch.undo()
    saved.save(Snapshot(second), {})
    assert sorted(path.name for path in folder.iterdir()) == ['1', '2']


def test_leftovers_of_interrupted_saves_and_deletions_are_removed(copy):
  folder = copy / 'checkpoints'
  for name in ('8.saving', '8.saving.orbax-checkpoint-tmp', '8.orbax-checkpoint-tmp'):
    shutil.copytree(folder / '6', folder / name)
  shutil.copytree(folder / '2', folder / '2.deleted')
  checkpoints.remove_unfinished(copy)
  assert sorted(path.name for path in folder.iterdir()) == ['2', '4', '6']


def test_a_state_that_differs_from_the_saved_one_is_refused(copy):
  path = copy / 'checkpoints' / '6' / checkpoints.MANIFEST
  record = json.loads(path.read_text())
  path.write_text(json.dumps(record | {'state_sha256': '0' * 64}))
  with contextlib.closing(checkpoints.Checkpoints(copy)) as saved:
    with pytest.raises(checkpoints.Broken, match='read is not the state that was saved'):
      saved.restore(prepared(CONFIG).initial_state(), 6)


def test_the_digest_depends_on_names_shapes_dtypes_and_bytes():
  tree = {'a': jax.numpy.arange(4.0), 'b': jax.random.key(1)}
  other_trees = [{'b': tree['b']}, tree | {'a': jax.numpy.arange(4)},
                 tree | {'a': jax.numpy.arange(4.0).reshape(2, 2)}, tree | {'b': jax.random.key(2)},
                 tree | {'a': -jax.numpy.arange(4.0)}]
  digests = [checkpoints.digest(x) for x in (tree, *other_trees)]
  assert len(set(digests)) == len(digests)
  assert checkpoints.digest(dict(tree)) == digests[0]


def test_absent_fields_that_an_earlier_version_has_saved_as_tuples_are_read(tmp_path):
  run = prepared(CONFIG)
  state = run.initial_state()
  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    saved.save(Snapshot(state._replace(target=())), {})
    restored, _ = saved.restore(state, 0)
  assert restored.target is None
  assert checkpoints.digest(restored) == checkpoints.digest(state)


def test_a_checkpoint_of_another_network_is_refused_by_the_name_of_an_array(tmp_path):
  state = prepared(CONFIG).initial_state()
  weights = {'kernel': jnp.zeros(3)}
  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    saved.save(Snapshot(state), {})
    with pytest.raises(ValueError, match='state: params/extra/kernel is only in this run'):
      saved.restore(state._replace(params=state.params | {'extra': weights}), 0)
    lacking = {name: value for name, value in state.params['params'].items() if name != 'value'}
    with pytest.raises(ValueError, match='state: params/params/value/bias is only in the check'):
      saved.restore(state._replace(params={'params': lacking}), 0)


@pytest.mark.parametrize('keep, expected', [(1, [7, 8]), (2, [6, 7, 8]), (3, [4, 6, 7, 8])])
def test_the_newest_checkpoint_of_the_last_segments_and_the_two_newest_are_kept(keep, expected,
                                                                                tmp_path):
  """With the actions of their segments: one begins after each second update."""
  state = prepared(CONFIG).initial_state()
  (tmp_path / 'actions').mkdir()
  with contextlib.closing(checkpoints.Checkpoints(tmp_path, keep)) as saved:
    for update in range(1, 9):
      segment = (update - 1) // 2
      (tmp_path / 'actions' / str(segment)).touch()
      saved.save(Snapshot(state._replace(update=jnp.int32(update)), None, segment, 2 * segment), {})
  assert checkpoints.saved_updates(tmp_path) == expected
  segments = {(update - 1) // 2 for update in expected}
  assert {int(path.name) for path in (tmp_path / 'actions').iterdir()} == segments


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
  state = prepared(CONFIG).initial_state()
  usage = shutil.disk_usage(tmp_path)
  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    saved.save(Snapshot(state._replace(update=jax.numpy.int32(1))), {})
    parameters = sum(x.nbytes for x in jax.tree.leaves(state.params))
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=parameters))
    message = f'and {parameters:,} are free.; the last good checkpoint is that of update 1, in '
    with pytest.raises(checkpoints.NotSaved, match=message):
      saved.save(Snapshot(state._replace(update=jax.numpy.int32(2))), {})
  assert checkpoints.saved_updates(tmp_path) == [1]


def test_files_that_are_written_while_a_save_fails_are_removed(tmp_path, monkeypatch):
  # Orbax raises the first error while threads of TensorStore still write other arrays.
  unfinished = tmp_path / 'checkpoints' / '1.saving.orbax-checkpoint-tmp' / 'state'
  threads = []

  def keep_writing():
    for number in range(100):
      with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed meanwhile
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / str(number)).write_bytes(b'array')
      time.sleep(0.003)

  def save_and_fail(*args, **kwargs):
    threads.append(threading.Thread(target=keep_writing))
    threads[0].start()
    raise OSError(errno.ENOSPC, 'No space left on device')

  with contextlib.closing(checkpoints.Checkpoints(tmp_path)) as saved:
    monkeypatch.setattr(saved._orbax, 'save', save_and_fail)
    with pytest.raises(checkpoints.NotSaved, match='No space left on device'):
      saved.save(Snapshot(prepared(CONFIG).initial_state()._replace(update=jnp.int32(1))), {})
    threads[0].join()
  assert not list((tmp_path / 'checkpoints').iterdir())


@pytest.mark.parametrize('content', [None, b'', b'{"config": {"see', b'\x00' * 100, b'[]'])
def test_a_lost_config_is_restored_from_the_newest_checkpoint(content, copy, uninterrupted):
  path = copy / 'config.json'
  before = json.loads(path.read_text())
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  (note,) = train_in(copy)
  assert 'it was restored from the checkpoint of update 6' in note
  assert json.loads(path.read_text()) == before
  if content is not None:
    assert (copy / 'broken' / 'config.json').read_bytes() == content
  assert receipts(copy) == receipts(uninterrupted)


def test_a_restored_config_comes_from_the_run_and_not_from_the_flags(copy):
  (copy / 'config.json').unlink()
  with pytest.raises(OtherExperiment, match='seed: 1 there, 2 now'):
    open_workdir(copy, CONFIG | {'seed': 2})


def test_a_lost_config_without_a_whole_checkpoint_is_refused_in_one_line(copy):
  for update in (2, 4, 6):
    (copy / 'checkpoints' / str(update) / checkpoints.MANIFEST).unlink()
  (copy / 'config.json').unlink()
  with pytest.raises(ValueError, match='config.json is missing, and no checkpoint has a copy'):
    train_in(copy)
  assert not (copy / 'config.json').exists()


def test_an_evaluation_reads_the_newest_good_checkpoint_and_moves_nothing(copy):
  break_file(largest_file(copy, 6), 'zeroed')
  before = sorted(copy.rglob('*'))
  assert evaluation.restore(copy, evaluation.read_experiment(copy)).update == 4
  assert sorted(copy.rglob('*')) == before
  for update in (2, 4):
    break_file(largest_file(copy, update), 'zeroed')
  with pytest.raises(ValueError, match='--workdir: no checkpoint in .* is whole'):
    evaluation.restore(copy, evaluation.read_experiment(copy))


def renamed_entry(folder, new):
  """Gives the first file in the manifest of a checkpoint another name."""
  path = folder / checkpoints.MANIFEST
  record = json.loads(path.read_text())
  entries = record['files']
  entries[new] = entries.pop(next(iter(entries)))
  path.write_text(json.dumps(record))


@pytest.mark.parametrize('name', [
    '/dev/zero', '/etc/passwd', '../4/manifest.json', '../../config.json', './meta/metadata',
    'meta/../meta/metadata', 'meta//metadata', 'state', '.', '', 'a\x00b', 'a\nb', 'a\ud800b',
    'x' * 5000])
def test_a_manifest_reads_only_files_inside_of_the_checkpoint(name, copy, monkeypatch):
  renamed_entry(copy / 'checkpoints' / '6', name)
  read = []
  monkeypatch.setattr(checkpoints, '_sha256', read.append)
  problem = checkpoints.problem(copy, 6)
  assert 'cannot be read' in problem
  assert problem.isprintable() and len(problem) < 400
  assert not read


@pytest.mark.parametrize('kind', ['fifo', 'link', 'link_to_device', 'linked_folder', 'socket'])
@pytest.mark.parametrize('is_named', [True, False])
def test_a_checkpoint_with_anything_but_files_and_folders_is_broken(kind, is_named, copy, tmp_path):
  folder = copy / 'checkpoints' / '6'
  path = folder / 'state' / '_METADATA' if is_named else folder / 'state' / 'more'
  if kind == 'linked_folder':
    path = folder / 'state' if is_named else folder / 'state' / 'd'
    path.rename(tmp_path / 'elsewhere')
    path.symlink_to(tmp_path / 'elsewhere')
  else:
    if is_named:
      path.rename(tmp_path / 'elsewhere')
    else:
      (tmp_path / 'elsewhere').write_bytes(b'')
    if kind == 'fifo':
      os.mkfifo(path)
    elif kind == 'socket':
      with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    else:
      path.symlink_to('/dev/zero' if kind == 'link_to_device' else tmp_path / 'elsewhere')
  problem = checkpoints.problem(copy, 6)
  assert 'cannot be read: it is ' in problem and path.name in problem


@pytest.mark.parametrize('name', [checkpoints.MANIFEST, 'meta/metadata'])
@pytest.mark.parametrize('kind', ['fifo', 'device', 'nested', 'huge'])
def test_a_manifest_or_meta_that_never_ends_is_not_read(name, kind, copy):
  path = copy / 'checkpoints' / '6' / name
  path.unlink()
  match kind:
    case 'fifo':
      os.mkfifo(path)
    case 'device':
      path.symlink_to('/dev/zero')
    case 'nested':
      path.write_text('[' * 10**6)
    case 'huge':
      path.touch()
      os.truncate(path, 2**40)
  assert checkpoints.problem(copy, 6)
  if name != checkpoints.MANIFEST:
    assert checkpoints.read_meta(copy, 6) is None


def test_sizes_are_compared_before_any_file_is_read(copy, monkeypatch):
  folder = copy / 'checkpoints' / '6'
  last = sorted(path for path in (folder / 'state').rglob('*') if path.is_file())[-1]
  break_file(last, 'longer')
  read = []
  monkeypatch.setattr(checkpoints, '_sha256', read.append)
  assert f'{last.stat().st_size:,} bytes in place of' in checkpoints.problem(copy, 6)
  assert not read


@pytest.mark.parametrize('entry', [
    {'bytes': '5', 'sha256': ''}, {'bytes': 1.5, 'sha256': ''}, {'bytes': True, 'sha256': ''},
    {'bytes': None, 'sha256': ''}, {'bytes': 5, 'sha256': 1}, {'bytes': 5}, 5])
def test_a_manifest_of_other_types_is_garbled(entry, copy):
  path = copy / 'checkpoints' / '6' / checkpoints.MANIFEST
  record = json.loads(path.read_text())
  record['files']['meta/metadata'] = entry
  path.write_text(json.dumps(record))
  assert checkpoints.problem(copy, 6) == 'manifest.json is garbled'


def test_a_manifest_with_a_name_twice_is_garbled(copy):
  path = copy / 'checkpoints' / '6' / checkpoints.MANIFEST
  text = path.read_text()
  assert checkpoints.problem(copy, 6) == ''
  path.write_text(text.replace('"files": {', '"files": {"meta/metadata": {},', 1))
  assert checkpoints.problem(copy, 6) == 'manifest.json is garbled'


def test_names_that_are_no_updates_are_not_checkpoints(copy):
  for name in ('²', '٣', '-1', '7.tmp'):
    (copy / 'checkpoints' / name).mkdir()
  assert checkpoints.saved_updates(copy) == [2, 4, 6]
