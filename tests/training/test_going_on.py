"""When a stopped run goes on where it was, when with new episodes, and when it is refused."""

import re
import shutil

import jax
import pytest

from podracer_jit.cli import compare, rerun
from podracer_jit.errors import EnvironmentFailed, OtherExperiment, Refused
from podracer_jit.training import program, restoring, sinks, stopping, trainer
from podracer_jit.workdir import checkpoints, journal, record
from tests import made, runs
from tests.runs import actions_of, changed, contents, fresh, segments_of, small
from tests.training import own_episodes
from tests.training.fake_program import STEPS, FakeProgram

# Segments of four updates; a run of six updates at least.
CONFIG = changed(small(), total_steps=8 * 8 * 5 + 1, env__renew_every_updates=4,
                 checkpoint__every_updates=0, checkpoint__keep=1, optimizer__anneal=False,
                 log__tensorboard=False)
OWN = 'tests.training.own_episodes:'
RENEWED = 'history: environments of A began anew before update 4: '


@pytest.fixture(scope='module')
def run():
  return fresh(CONFIG)


@pytest.fixture(scope='module')
def whole(run, tmp_path_factory):
  """A run that was never stopped."""
  return made.once(tmp_path_factory, 'going_on_whole', lambda workdir: runs.train(run, workdir))


@pytest.fixture(scope='module')
def stopped(run, tmp_path_factory):
  """The run, stopped after update 3 of its first segment."""
  return made.once(tmp_path_factory, 'going_on', lambda workdir: runs.train(run, workdir, 3))


@pytest.fixture
def copy(stopped, tmp_path):
  return shutil.copytree(stopped, tmp_path / 'run')


def headers(workdir):
  return [(header['segment'], header['first_update'], header.get('history'))
          for header in journal.read_receipts(workdir).headers]


def check_renewed(workdir, whole, reason, capsys):
  """Checks that environments began anew before update 4, and that all say why."""
  assert record.read(workdir).renewals == {4: reason}
  assert headers(workdir)[:2] == [
      (0, 1, None), (1, 4, {'first_update': 4, 'renewed': reason})]
  receipts, expected = (journal.read_receipts(path).by_update for path in (workdir, whole))
  assert [receipts[update] == expected[update] for update in (1, 2, 3, 4)] == [
      True, True, True, False]
  capsys.readouterr()
  assert compare.main(['podracer_jit compare', str(workdir), str(whole)]) == 1
  assert f'{RENEWED}{reason}\n' in capsys.readouterr().out


@pytest.mark.parametrize('how', ['missing', 'cut', 'another byte', 'emptied'])
def test_actions_that_are_not_what_was_written_are_refused(how, run, copy, whole, capsys):
  path = copy / 'actions' / '0'
  content = path.read_bytes()
  match how:
    case 'missing':
      path.unlink()
    case 'cut':
      path.write_bytes(content[:-1])
    case 'emptied':
      path.write_bytes(b'')
    case 'another byte':
      path.write_bytes(content[:40] + bytes([1 - content[40]]) + content[41:])
  with pytest.raises(ValueError) as refused:  # exit code 2
    runs.train(run, copy)
  message = str(refused.value)
  assert message.startswith('--workdir: ') and '\n' not in message
  assert str(path) in message and '--renew_envs' in message
  assert runs.train(run, copy, renew_envs=True)
  check_renewed(copy, whole, '--renew_envs', capsys)


def test_actions_after_the_checkpoint_are_cut(run, copy, whole):
  with (copy / 'actions' / '0').open('ab') as file:
    file.write(b'of an update that was not saved')
  (copy / 'actions' / '1').write_bytes(b'of a segment that was not saved')
  assert runs.train(run, copy)
  assert contents(copy) == contents(whole)


@pytest.mark.parametrize('task', ['CartPole-v1', 'gymnax:CartPole-v1'])
def test_a_changed_exploration_counts_at_once(task, tmp_path):
  config = changed(small('pqn', task), total_steps=300, loss__epsilon=0.0)
  assert not runs.train(runs.prepared(config), tmp_path / 'a', stop=2)
  shutil.copytree(tmp_path / 'a', tmp_path / 'b')
  random = changed(config, loss__epsilon=1.0)
  assert runs.train(runs.prepared(config), tmp_path / 'a')
  assert runs.train(runs.prepared(random), tmp_path / 'b', change=('loss.epsilon',))
  a, b = (journal.read_receipts(tmp_path / name).by_update for name in 'ab')
  assert a[2] == b[2] and a[3]['batch'] != b[3]['batch']


def test_a_change_that_does_not_fit_the_environments_is_refused(tmp_path):
  config = changed(small('r2d2', 'CartPole-v1'), num_minibatches=1, total_steps=600,
                   network__core='gru', loss__n_step=4)
  config['replay'] |= dict(capacity=64, min_size=16, batch_size=4, gradient_steps=1)
  assert not runs.train(runs.prepared(config), tmp_path, stop=3)
  other = runs.prepared(changed(config, loss__n_step=3))
  replays = [run.learner.replay_shapes() for run in (runs.prepared(config), other)]
  assert jax.tree.leaves(replays[0]) == jax.tree.leaves(replays[1])
  with pytest.raises(OtherExperiment, match='loss.n_step: cannot change in .*: '):
    runs.train(other, tmp_path, change=('loss.n_step',))
  assert runs.train(other, tmp_path, change=('loss.n_step',), renew_envs=True)


def test_sac_goes_on_beyond_two_billion_steps(tmp_path):
  config = changed(small('sac', 'Pendulum-v1'), scheme='apex_lockstep', num_minibatches=1,
                   total_steps=2**31 - 1000)
  config['replay'] |= dict(capacity=256, min_size=64, batch_size=16, gradient_steps=1)
  assert not runs.train(runs.prepared(config), tmp_path, stop=3)
  longer = changed(config, total_steps=2**32)
  assert not runs.train(runs.prepared(longer), tmp_path, stop=5, extend=True)
  assert max(journal.read_receipts(tmp_path).by_update) == 5


def test_other_versions_begin_new_episodes(run, copy, whole, capsys, monkeypatch):
  versions = record.versions
  was = versions()['envpool']
  monkeypatch.setattr(restoring.record, 'versions',
                      lambda *others: versions(*others) | {'envpool': '0.0.1'})
  notes = []

  class Notes(sinks.Sink):
    def begin(self, start):
      notes.append(start.header['versions']['envpool'])

  reason = f'envpool was {was} and is 0.0.1'
  with runs.opened(run, copy) as opened:
    assert f'environments begin anew here, with new episodes: {reason}' in opened.notes
    assert opened.train(stopping.Stopping(), sinks.users([Notes()]), quiet=True)
  assert set(notes) == {'0.0.1'}
  monkeypatch.undo()
  check_renewed(copy, whole, reason, capsys)


def test_other_numbers_of_accelerators_begin_new_episodes(run):
  surroundings = restoring.surroundings(run)
  assert journal.LEARNERS not in surroundings  # on CPUs bits do not depend on it
  for then, now, expected in [
      (4, 2, ['it learned on 4 devices and learns on 2']), (4, 4, []), (None, 4, [])]:
    before, after = (surroundings | ({journal.LEARNERS: count} if count else {})
                     for count in (then, now))
    assert list(restoring._differing(before, after)) == expected


def test_an_update_of_several_accelerators_is_not_repeated_on_one():
  headers = [dict(first_update=1, learners=1), dict(first_update=3, learners=4)]
  receipts = {1: {}, 3: {}}
  assert rerun.header_of(headers, receipts, 1) == headers[0]
  with pytest.raises(ValueError, match=r'^--update: the run learned on 4 GPUs or TPUs, on whose '
                     'number its bits depend; updates can be repeated only if it was one$'):
    rerun.header_of(headers, receipts, 3)


def test_other_versions_do_not_matter_between_two_segments(run, tmp_path, whole, monkeypatch):
  assert not runs.train(run, tmp_path, 4)
  versions = record.versions
  monkeypatch.setattr(restoring.record, 'versions',
                      lambda *others: versions(*others) | {'envpool': '0.0.1'})
  assert runs.train(run, tmp_path)
  assert record.read(tmp_path).renewals == {}
  assert contents(tmp_path) == contents(whole)


def test_environments_that_do_not_repeat_are_named(tmp_path):
  run = fresh(changed(CONFIG, env__task=f'{OWN}Unseeded'))
  assert not runs.train(run, tmp_path, 2)
  with pytest.raises(Refused, match=(
      f'^env.task: {OWN}Unseeded cannot go on where it was: after 16 steps .*--renew_envs')):
    runs.train(run, tmp_path)
  assert checkpoints.saved_updates(tmp_path) == [2]
  assert runs.train(run, tmp_path, renew_envs=True)


def test_an_environment_that_fails_in_a_replay_is_named_with_its_step(tmp_path, monkeypatch):
  file = tmp_path / 'breaks'
  monkeypatch.setenv(own_episodes.BREAKS, str(file))
  run = fresh(changed(CONFIG, env__task=f'{OWN}Breaks'))
  workdir = tmp_path / 'run'
  assert not runs.train(run, workdir, 2)
  file.touch()
  with pytest.raises(EnvironmentFailed) as failed:
    runs.train(run, workdir)
  message = str(failed.value)
  assert '\n' not in message and 'the hinge is broken' in message
  assert re.search(f'^{OWN}Breaks: step .* of environment 0 \\(seed .*; it was replayed, in one of '
                   r'the steps \d+ to \d+', message)
  file.unlink()
  assert runs.train(run, workdir)


def test_an_extended_run_has_the_bits_of_the_longer_one(run, whole, tmp_path):
  """The shorter run ends in the middle of a segment."""
  shorter = fresh(changed(CONFIG, total_steps=8 * 8 * 2 + 1))
  assert runs.train(shorter, tmp_path)
  assert segments_of(tmp_path) == {3: 0}
  assert runs.train(run, tmp_path, extend=True)
  assert contents(tmp_path) == contents(whole)
  assert [header[:2] for header in headers(tmp_path)] == [(0, 1), (0, 4), (1, 5)]


@pytest.mark.parametrize('field, value, segment', [
    ('loss.entropy_coef', 0.5, 0), ('optimizer.learning_rate', 0.1, 0),
    ('env.max_episode_steps', 20, 1), ('env.renew_every_updates', 3, 1), ('scheme', 'cleanba', 1),
    ('unroll_length', 4, 1)])
def test_only_some_changes_begin_a_segment(field, value, segment, copy, whole):
  run = fresh(changed(CONFIG, **{field.replace('.', '__'): value}))
  assert runs.train(run, copy, change=[field])
  assert [header[:2] for header in headers(copy)][:2] == [(0, 1), (segment, 4)]
  batches = [journal.read_receipts(path).by_update[4]['batch'] for path in (copy, whole)]
  assert (batches[0] == batches[1]) == (segment == 0)


@pytest.mark.parametrize('keep', [1, 9])
def test_actions_stay_only_while_a_checkpoint_needs_them(keep, tmp_path):
  run = fresh(changed(CONFIG, checkpoint__keep=keep))
  assert not runs.train(run, tmp_path, 3)
  assert actions_of(tmp_path).keys() == {0}
  assert not runs.train(run, tmp_path, 5)
  assert actions_of(tmp_path).keys() == {0, 1} and segments_of(tmp_path) == {3: 0, 5: 1}
  assert runs.train(run, tmp_path)
  last = max(checkpoints.saved_updates(tmp_path))
  assert segments_of(tmp_path) == {3: 0, 5: 1, last: 1} if keep == 9 else {5: 1, last: 1}
  assert actions_of(tmp_path).keys() == set(segments_of(tmp_path).values())


def test_a_run_that_ends_with_a_segment_leaves_no_actions(run, tmp_path):
  assert not runs.train(run, tmp_path, 4)
  assert segments_of(tmp_path) == {4: 1} and not (tmp_path / 'actions').exists()


class Clock:
  """In place of the module `time`: an update takes a second, and saving as long as it is told."""

  def __init__(self, save_s):
    self.now_s = 0.0
    self.save_s = save_s

  def monotonic(self):
    return self.now_s

  perf_counter = monotonic


class Ticks(sinks.Sink):
  """Lets the clock go on, and notes what is saved."""

  def __init__(self, clock):
    self.saves = []
    self._clock = clock

  def update(self, record, receipt):
    self._clock.now_s += 1.0

  def keeps(self):  # it is asked while a checkpoint is saved
    self._clock.now_s += self._clock.save_s
    return ()

  def saved(self, at):
    self.saves.append(at.update)


@pytest.mark.parametrize('every_seconds, save_s, expected', [
    (3.0, 0.0, [3, 6, 9, 12]), (3.0, 0.125, [3, 6, 9, 12]), (3.0, 0.25, [3, 8, 12]),
    (0.5, 0.0, [*range(1, 13)]), (0.5, 0.125, [1, 4, 7, 10, 12]), (0.0, 0.0, [12])])
def test_a_checkpoint_by_the_clock_waits_twenty_times_as_long_as_the_last_save(
    every_seconds, save_s, expected, tmp_path, monkeypatch):
  clock = Clock(save_s)
  ticks = Ticks(clock)
  monkeypatch.setattr(trainer, 'GraphProgram', FakeProgram)
  monkeypatch.setattr(trainer, 'time', clock)
  run = fresh(changed(CONFIG, total_steps=12 * STEPS, env__renew_every_updates=0,
                      checkpoint__every_seconds=every_seconds))
  assert runs.train(run, tmp_path, callbacks=[ticks])
  assert ticks.saves == expected


def test_a_run_that_was_saved_by_the_clock_goes_on_after_a_crash(whole, tmp_path):
  """Its checkpoint is that of the first update, as each save would wait for seconds."""
  class Crashes(sinks.Sink):
    def update(self, record, receipt):
      if record['update'] == 3:
        raise RuntimeError('crash')

  by_clock = fresh(changed(CONFIG, checkpoint__every_seconds=1e-6))
  with pytest.raises(sinks.CallbackFailed, match='crash'):
    runs.train(by_clock, tmp_path, callbacks=[Crashes()])
  assert checkpoints.saved_updates(tmp_path)[0] == 1
  assert runs.train(by_clock, tmp_path)
  assert contents(tmp_path)[:4] == contents(whole)[:4]


def test_a_stop_between_two_segments_saves_the_segment_before(tmp_path, monkeypatch):
  segment = program.GraphProgram.segment

  def then_stopped(self, report, watcher):
    segment(self, report, watcher)
    monkeypatch.setattr(watcher, 'asked_to_stop', lambda: True)

  monkeypatch.setattr(program.GraphProgram, 'segment', then_stopped)
  assert not runs.train(fresh(CONFIG), tmp_path)
  assert checkpoints.saved_updates(tmp_path) == [4]
