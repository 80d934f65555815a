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
import numpy as np
import pytest

from podracer_jit.play import evaluation
from podracer_jit.training import inherit, train
from podracer_jit.workdir import checkpoint, journal, manifest, workdirs
from tests import made
from tests.runs import changed, fresh, initial_state, prepared, small
from tests.schemes import test_apex

UPDATES = 6
CONFIG = changed(small(), total_steps=10**6, checkpoint__every_updates=2, log__tensorboard=False)


def train_in(workdir, updates=UPDATES):
  """Trains as the command does, in a new or a used workdir; returns the notes for the user."""
  run = prepared(CONFIG)
  notes = workdirs.open_workdir(workdir, run.experiment.fields)
  update, repaired = checkpoint.recover(workdir)
  train.train(run, workdir, ends=list(range(2, updates + 1, 2)), update=update)
  return notes + repaired


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
  files = (path for path in (workdir / 'checkpoints' / str(update)).rglob('*') if path.is_file())
  return max(files, key=lambda path: path.stat().st_size)


def test_a_run_in_which_no_episode_ends_says_so_once(tmp_path, capsys):
  """An episode of Pendulum has 200 steps, and a segment 16; JAX functions go on over segments."""
  for task, words in (
      ('Pendulum-v1', 'after 16 steps of each (checkpoint.every_updates = 2), and longer episodes '
       'never end; episodes of 200 steps need checkpoint.every_updates = 25 or more'),
      ('gymnax:Pendulum-v1', '')):
    run = fresh(changed(small('ppo', task), total_steps=10**6, checkpoint__every_updates=2,
                        log__tensorboard=False))
    workdir = tmp_path / task
    workdirs.make(workdir)
    workdirs.open_workdir(workdir, run.experiment.fields)
    train.train(run, workdir, last=2)
    assert 'no episode' not in capsys.readouterr().out
    train.train(run, workdir, last=8)
    out = capsys.readouterr().out
    assert out.count('warning: no episode has ended yet') == bool(words) and words in out


def test_metrics_and_receipts_reach_the_disk_before_a_checkpoint_is_complete(tmp_path,
                                                                            monkeypatch):
  """Otherwise a power failure could leave a checkpoint without the lines of its updates."""
  sync, replace = os.fsync, os.replace
  on_disk = {}  # bytes of each file, when it was last synced
  complete = []

  def note_sync(descriptor):
    sync(descriptor)
    on_disk[os.readlink(f'/proc/self/fd/{descriptor}')] = os.fstat(descriptor).st_size

  def note_replace(source, target):
    replace(source, target)
    if Path(target).name == 'manifest.json':
      complete.append(Path(target).parent.name)
      assert str(tmp_path) in on_disk  # the names of the files
      for name in ('metrics.jsonl', 'receipts.jsonl'):
        assert on_disk.get(str(tmp_path / name)) == (tmp_path / name).stat().st_size > 0

  monkeypatch.setattr(os, 'fsync', note_sync)
  monkeypatch.setattr(os, 'replace', note_replace)
  train_in(tmp_path)
  assert complete == ['2', '4', '6']


def test_every_random_flipped_bit_is_detected(copy):
  """Flips 74 bits, one at a time, in all files of a checkpoint and in its manifest."""
  rng = random.Random(1)
  run = prepared(CONFIG)
  like = run.initial_state()
  folder = copy / 'checkpoints' / '6'
  files = sorted(path for path in folder.rglob('*') if path.is_file())
  weights = [path.stat().st_size for path in files]
  with contextlib.closing(checkpoint.Checkpoints(copy)) as saved:
    saved.restore(like, 6)
    for _ in range(74):
      (path,) = rng.choices(files, weights)
      content = bytearray(path.read_bytes())
      place = rng.randrange(len(content))
      bit = rng.randrange(8)
      content[place] ^= 1 << bit
      path.write_bytes(content)
      with pytest.raises(checkpoint.Broken):
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
  assert checkpoint.newest_whole(copy) == 6
  assert journal.read_receipts(copy).problems == []


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
    checkpoint.recover(copy)
  message = str(refused.value)
  assert message.startswith('--workdir: ') and '\n' not in message
  assert '2: ' in message and '6: ' in message
  assert sorted(copy.rglob('*')) == before


def test_a_checkpoint_without_a_manifest_is_not_read(copy, uninterrupted):
  (copy / 'checkpoints' / '6' / manifest.NAME).unlink()
  assert checkpoint.saved_updates(copy) == [2, 4]
  (note,) = train_in(copy)
  assert 'it is not saved to the end' in note
  assert receipts(copy) == receipts(uninterrupted)


def test_a_run_whose_first_save_was_interrupted_begins_anew(copy, uninterrupted):
  for update in (2, 4):
    shutil.rmtree(copy / 'checkpoints' / str(update))
  (copy / 'checkpoints' / '6' / manifest.NAME).unlink()
  assert len(train_in(copy)) == 1
  assert receipts(copy) == receipts(uninterrupted)


def make_old(workdir, update):
  """Removes what checkpoints before version 0.5 did not have: the manifest and the config."""
  folder = workdir / 'checkpoints' / str(update)
  (folder / manifest.NAME).unlink()
  path = folder / 'meta' / 'metadata'
  meta = json.loads(path.read_text())
  path.write_text(json.dumps({name: meta[name] for name in (
      'segment', 'window', 'episodes', 'elapsed_s')}))


def test_a_checkpoint_from_before_manifests_is_read(copy, uninterrupted):
  shutil.rmtree(copy / 'checkpoints' / '6')
  make_old(copy, 4)
  assert train_in(copy) == []
  assert receipts(copy) == receipts(uninterrupted)


def test_an_old_checkpoint_that_cannot_be_read_is_set_aside(copy, uninterrupted, capsys):
  make_old(copy, 6)
  for path in (copy / 'checkpoints' / '6' / 'state').rglob('*'):
    if path.is_file():
      break_file(path, 'emptied')
  train_in(copy)
  output = capsys.readouterr().out
  assert 'the checkpoint of update 6 is broken' in output
  assert 'going on from update 4' in output
  assert receipts(copy) == receipts(uninterrupted)


def test_leftovers_of_interrupted_saves_and_deletions_are_removed(copy):
  folder = copy / 'checkpoints'
  shutil.copytree(folder / '6', folder / '8.orbax-checkpoint-tmp')
  shutil.copytree(folder / '2', folder / '2.deleted')
  checkpoint.remove_unfinished(copy)
  assert sorted(path.name for path in folder.iterdir()) == ['2', '4', '6']


def test_a_state_that_differs_from_the_saved_one_is_refused(copy):
  path = copy / 'checkpoints' / '6' / manifest.NAME
  record = json.loads(path.read_text())
  path.write_text(json.dumps(record | {'state_sha256': '0' * 64}))
  with contextlib.closing(checkpoint.Checkpoints(copy)) as saved:
    with pytest.raises(checkpoint.Broken, match='read is not the state that was saved'):
      saved.restore(prepared(CONFIG).initial_state(), 6)


def test_the_digest_depends_on_names_shapes_dtypes_and_bytes():
  tree = {'a': jax.numpy.arange(4.0), 'b': jax.random.key(1)}
  other_trees = [{'b': tree['b']}, tree | {'a': jax.numpy.arange(4)},
                 tree | {'a': jax.numpy.arange(4.0).reshape(2, 2)}, tree | {'b': jax.random.key(2)},
                 tree | {'a': -jax.numpy.arange(4.0)}]
  digests = [manifest.digest(x) for x in (tree, *other_trees)]
  assert len(set(digests)) == len(digests)
  assert manifest.digest(dict(tree)) == digests[0]


def as_earlier_versions(state):
  """Returns a state with the names, and the absent fields, that earlier versions saved."""
  def renamed(fields, **names):
    return {names.get(name, name): value for name, value in fields._asdict().items()}

  replay = state.replay
  slots = () if replay.slots is None else renamed(replay.slots, transitions='held')
  return state._replace(replay=renamed(replay) | dict(
      ring=renamed(replay.ring, is_reset_stack='fresh'), slots=slots))


@pytest.mark.parametrize('eviction', ['fifo', 'prioritised'])
def test_a_replay_that_an_earlier_version_has_saved_is_read(eviction, tmp_path):
  run = prepared(test_apex.config('dqn', replay__eviction=eviction))
  empty = initial_state(run)
  state = empty._replace(replay=jax.tree.map(
      lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype), empty.replay))
  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    saved.save(as_earlier_versions(state), {})
    like = state._replace(replay=run.learner.replay_shapes())
    restored, _ = saved.restore(like, 0)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored.replay, state.replay)
    inherited = saved.restore_replay(like.replay, 0)
    jax.tree.map(np.testing.assert_array_equal, inherited, state.replay)
  assert inherit.problem_of_shapes(run, tmp_path, 0) == ''


def test_absent_fields_that_an_earlier_version_has_saved_as_tuples_are_read(tmp_path):
  run = prepared(CONFIG)
  state = run.initial_state()
  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    saved.save(state._replace(target=()), {})
    restored, _ = saved.restore(state, 0)
  assert restored.target is None
  assert manifest.digest(restored) == manifest.digest(state)


def test_a_checkpoint_of_another_network_is_refused_by_the_name_of_an_array(tmp_path):
  state = prepared(CONFIG).initial_state()
  weights = {'kernel': jnp.zeros(3)}
  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    saved.save(state, {})
    with pytest.raises(ValueError, match='state: params/extra/kernel is only in this run'):
      saved.restore(state._replace(params=state.params | {'extra': weights}), 0)
    lacking = {name: value for name, value in state.params['params'].items() if name != 'value'}
    with pytest.raises(ValueError, match='state: params/params/value/bias is only in the check'):
      saved.restore(state._replace(params={'params': lacking}), 0)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
  state = prepared(CONFIG).initial_state()
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as saved:
    for update in (1, 2, 3):
      saved.save(state._replace(update=jax.numpy.int32(update)), {})
  assert checkpoint.updates_in(tmp_path) == [2, 3]


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
  state = prepared(CONFIG).initial_state()
  usage = shutil.disk_usage(tmp_path)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    saved.save(state._replace(update=jax.numpy.int32(1)), {})
    parameters = sum(x.nbytes for x in jax.tree.leaves(state.params))
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=parameters))
    message = f'and {parameters:,} are free.; the last good checkpoint is that of update 1, in '
    with pytest.raises(checkpoint.NotSaved, match=message):
      saved.save(state._replace(update=jax.numpy.int32(2)), {})
  assert checkpoint.updates_in(tmp_path) == [1]


def test_files_that_are_written_while_a_save_fails_are_removed(tmp_path, monkeypatch):
  # Orbax raises the first error while threads of TensorStore still write other arrays.
  unfinished = tmp_path / 'checkpoints' / '1.orbax-checkpoint-tmp' / 'state.orbax-checkpoint-tmp'
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

  with contextlib.closing(checkpoint.Checkpoints(tmp_path)) as saved:
    monkeypatch.setattr(saved._manager, 'save', save_and_fail)
    with pytest.raises(checkpoint.NotSaved, match='No space left on device'):
      saved.save(prepared(CONFIG).initial_state()._replace(update=jax.numpy.int32(1)), {})
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
  with pytest.raises(workdirs.OtherExperiment, match='seed: 1 there, 2 now'):
    workdirs.open_workdir(copy, prepared(CONFIG).experiment.fields | {'seed': 2})


def test_a_lost_config_of_old_checkpoints_is_refused_in_one_line(copy):
  for update in (2, 4, 6):
    make_old(copy, update)
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
  path = folder / manifest.NAME
  record = json.loads(path.read_text())
  files = record['files']
  files[new] = files.pop(next(iter(files)))
  path.write_text(json.dumps(record))


@pytest.mark.parametrize('name', [
    '/dev/zero', '/etc/passwd', '../4/manifest.json', '../../config.json', './meta/metadata',
    'meta/../meta/metadata', 'meta//metadata', 'state', '.', '', 'a\x00b', 'a\nb', 'a\ud800b',
    'x' * 5000])
def test_a_manifest_reads_only_files_inside_of_the_checkpoint(name, copy, monkeypatch):
  renamed_entry(copy / 'checkpoints' / '6', name)
  read = []
  monkeypatch.setattr(manifest, '_sha256', read.append)
  problem = checkpoint.problem(copy, 6)
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
  problem = checkpoint.problem(copy, 6)
  assert 'cannot be read: it is ' in problem and path.name in problem
  if is_named is False:
    make_old(copy, 6)
    assert 'cannot be read: it is ' in checkpoint.problem(copy, 6)


@pytest.mark.parametrize('name', [manifest.NAME, 'meta/metadata'])
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
  assert checkpoint.problem(copy, 6)
  if name != manifest.NAME:
    assert checkpoint.read_meta(copy, 6) is None


def test_sizes_are_compared_before_any_file_is_read(copy, monkeypatch):
  folder = copy / 'checkpoints' / '6'
  last = sorted(path for path in (folder / 'state').rglob('*') if path.is_file())[-1]
  break_file(last, 'longer')
  read = []
  monkeypatch.setattr(manifest, '_sha256', read.append)
  assert f'{last.stat().st_size:,} bytes in place of' in checkpoint.problem(copy, 6)
  assert not read


@pytest.mark.parametrize('entry', [
    {'bytes': '5', 'sha256': ''}, {'bytes': 1.5, 'sha256': ''}, {'bytes': True, 'sha256': ''},
    {'bytes': None, 'sha256': ''}, {'bytes': 5, 'sha256': 1}, {'bytes': 5}, 5])
def test_a_manifest_of_other_types_is_garbled(entry, copy):
  path = copy / 'checkpoints' / '6' / manifest.NAME
  record = json.loads(path.read_text())
  record['files']['meta/metadata'] = entry
  path.write_text(json.dumps(record))
  assert checkpoint.problem(copy, 6) == 'manifest.json is garbled'


def test_a_manifest_with_a_name_twice_is_garbled(copy):
  path = copy / 'checkpoints' / '6' / manifest.NAME
  text = path.read_text()
  assert checkpoint.problem(copy, 6) == ''
  path.write_text(text.replace('"files": {', '"files": {"meta/metadata": {},', 1))
  assert checkpoint.problem(copy, 6) == 'manifest.json is garbled'


def test_names_that_are_no_updates_are_not_checkpoints(copy):
  for name in ('²', '٣', '-1', '7.tmp'):
    (copy / 'checkpoints' / name).mkdir()
  assert checkpoint.updates_in(copy) == [2, 4, 6]
