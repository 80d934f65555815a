"""Evaluations during training: they change no bit, survive crashes and keep the best checkpoint."""

import contextlib
import errno
import json
import os
import threading
import time

import pytest

from podracer_jit.errors import NotSaved
from podracer_jit.experiment.resolve import resolve
from podracer_jit.play import evaluation
from podracer_jit.training import evaluator
from podracer_jit.training.sinks import STOP, CallbackFailed, Sink
from podracer_jit.workdir import checkpoints, journal
from tests import runs
from tests.runs import changed, open_workdir, prepared, small
from tests.tiers import essential
from tests.training.test_sinks import tensorboard_events

NAN = float('nan')
INF = float('inf')
EVAL = dict(eval__every_updates=2, eval__num_episodes=5, eval__num_envs=2)
STEPS = 700  # 11 updates
CONFIG = changed(small(), total_steps=STEPS, checkpoint__every_updates=2, checkpoint__keep=1)


def train_in(workdir, config=CONFIG, *callbacks):
  """Trains as the command does, in a new or a used workdir."""
  run = prepared(config)
  open_workdir(workdir, run.experiment.fields)
  return runs.train_in(run, workdir, callbacks)


def curve(workdir):
  return [{name: value for name, value in record.items() if name != 'seconds'}
          for record in evaluator.read(workdir)]


def receipts(workdir):
  return journal.read_receipts(workdir).by_update


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """An uninterrupted run with evaluations: its workdir, and the records of its callback."""
  workdir = tmp_path_factory.mktemp('uninterrupted')
  records = []

  class Record(Sink):
    def evaluated(self, record):
      records.append(dict(record))

  assert train_in(workdir, changed(CONFIG, **EVAL), Record())
  return workdir, records


def test_training_has_the_same_bits_with_evaluations(uninterrupted, tmp_path):
  train_in(tmp_path)
  assert receipts(tmp_path) == receipts(uninterrupted[0])
  assert not (tmp_path / evaluator.NAME).exists()


def test_evaluations_are_in_the_file_in_tensorboard_and_in_callbacks(uninterrupted):
  workdir, callback_records = uninterrupted
  records = evaluator.read(workdir)
  last = max(receipts(workdir))
  assert [record['update'] for record in records] == [2, 4, 6, 8, 10, last]
  steps = {line['update']: line['steps'] for line in journal.read_lines(workdir / journal.METRICS)}
  for record in records:
    assert record['steps'] == steps[record['update']]
    assert record['num_episodes'] == 5 and record['seconds'] > 0
    assert record['min'] <= record['median'] <= record['max']
  assert callback_records == records
  points = {event.step: value.simple_value for event in tensorboard_events(workdir / 'tensorboard')
            for value in event.summary.value if value.tag == 'eval/episodic_return'}
  assert points == pytest.approx({record['steps']: record['mean'] for record in records})


def test_a_video_of_each_second_evaluation_and_of_the_last_one(tmp_path):
  """A run that goes on makes the same ones; TensorBoard has none."""
  config = changed(small(task='Catch-v0'), total_steps=STEPS, checkpoint__every_updates=2, **EVAL,
                   eval__video_every=2, log__tensorboard=False)
  notes = []

  class Notes(Sink):
    def note(self, line):
      notes.append(line)

  def stops(record):
    return STOP if record['update'] == 5 else None

  train_in(tmp_path, config, stops, Notes())
  assert train_in(tmp_path, config, Notes())
  records = evaluator.read(tmp_path)
  updates = [record['update'] for record in records]
  assert len(updates) > 4
  with_video = {*updates[::2], updates[-1]}
  assert {record['update'] for record in records if 'video' in record} == with_video
  assert {path.name for path in (tmp_path / 'videos').iterdir()} == {
      f'{update}.mp4' for update in with_video}
  # An MP4 file begins with a box of this type.
  assert all((tmp_path / record['video']).read_bytes()[4:8] == b'ftyp'
             for record in records if 'video' in record)
  assert sum('.mp4 shows an episode of return' in line for line in notes) == len(with_video)


def test_a_task_that_cannot_be_filmed_is_evaluated_all_the_same(tmp_path, monkeypatch):
  def cannot(player, path, settings, check):
    check()
    raise ValueError('no video: it cannot be rendered')

  monkeypatch.setattr('podracer_jit.play.video.film', cannot)
  notes = []

  class Notes(Sink):
    def note(self, line):
      notes.append(line)

  assert train_in(tmp_path, changed(CONFIG, **EVAL, eval__video_every=1), Notes())
  records = evaluator.read(tmp_path)
  assert len(records) == 6 and all('error' not in x and 'video' not in x for x in records)
  assert all(line.endswith('no video: it cannot be rendered') for line in notes
             if line.startswith('evaluation')) and notes


def test_an_evaluation_has_an_epsilon_of_its_own(tmp_path, monkeypatch):
  """Training explores by other epsilons; the actor of Ape-X's figure 7 adds no data."""
  config = small('dqn', task='CartPole-v1')
  config = changed(config, total_steps=STEPS, checkpoint__every_updates=2, eval__epsilon=0.25,
                   loss__epsilons=(1.0,), num_minibatches=1, **EVAL)
  players = []
  play = evaluation.play
  monkeypatch.setattr(evaluation, 'play', lambda player, *args: (
      players.append(player), play(player, *args))[1])
  assert train_in(tmp_path, config)
  assert {player.epsilon for player in players} == {0.25}
  assert len(evaluator.read(tmp_path)) == len(players) > 3


@pytest.mark.parametrize('loss, fields, message', [
    ('ppo', dict(eval__epsilon=0.1), 'eval.epsilon: PPO explores in another way than by random'),
    ('dqn', dict(eval__epsilon=0.1, eval__greedy=True), 'eval.epsilon: a greedy evaluation takes'),
    ('dqn', dict(eval__epsilon=1.5), 'eval.epsilon: must be between 0 and 1, got 1.5')])
def test_an_epsilon_that_an_evaluation_cannot_have_is_refused(loss, fields, message):
  with pytest.raises(ValueError, match='^' + message):
    resolve(changed(small(loss), **fields))


def test_the_best_checkpoint_is_kept(uninterrupted):
  """Besides the two newest; it plays the episodes that the file of evaluations has."""
  workdir, _ = uninterrupted
  records = evaluator.read(workdir)
  best = max(records, key=lambda record: record['mean'])['update']
  assert evaluator.best_update(workdir) == best
  assert set(checkpoints.saved_updates(workdir)) == {
      best, *(record['update'] for record in records[-2:])}
  # With the seeds of its update the best checkpoint has the mean that is in the file.
  experiment = evaluation.read_experiment(workdir)
  player = evaluation.restore(workdir, experiment, best)
  episodes = evaluation.play(
      player, evaluation.Settings(5, 2, experiment.seed, 10**6, index=best))
  written = next(record for record in records if record['update'] == best)
  assert evaluation.statistics(player.task, episodes)['mean'] == written['mean']
  next_episodes = evaluation.play(
      player, evaluation.Settings(5, 2, experiment.seed, 10**6, index=best + 1))
  assert episodes != next_episodes  # each evaluation has its own seeds


@pytest.mark.parametrize('means, best', [
    ([NAN, 3.0, 2.0], 2), ([NAN], None), ([INF, 1.0], 2),
    ([1.0, 3.0, 2.0], 2), ([3.0, 3.0], 1), ([-5.0], 1), ([None, -1.0, None], 2), ([None], None),
    ([], None)])
def test_the_best_update_has_the_highest_mean(means, best):
  records = [{'update': i, 'error': 'x'} if mean is None else {'update': i, 'mean': mean}
             for i, mean in enumerate(means, 1)]
  assert evaluator.best_of(records) == best


@pytest.mark.parametrize('crash', essential([3, 5, 6, 9], 5))
def test_a_crashed_run_has_the_same_evaluations(crash, uninterrupted, tmp_path):
  """An evaluation may be running at the crash, or finished and not yet written."""

  def crashes(record):
    if record['update'] == crash:
      raise RuntimeError('crash')

  config = changed(CONFIG, **EVAL)
  with pytest.raises(CallbackFailed):
    train_in(tmp_path, config, crashes)
  train_in(tmp_path, config)
  assert receipts(tmp_path) == receipts(uninterrupted[0])
  assert curve(tmp_path) == curve(uninterrupted[0])
  assert checkpoints.saved_updates(tmp_path) == checkpoints.saved_updates(uninterrupted[0])


def test_metrics_say_how_long_training_waited_for_an_evaluation(tmp_path, monkeypatch):
  """The evaluation of update 4 ends 0.3 s after training begins to wait for it, after update 6."""
  play = evaluation.play
  before_save = evaluator.Evaluator.before_save
  pending = threading.Event()

  def slow(player, settings, progress):
    if settings.index == 4:
      assert pending.wait(60)
      time.sleep(0.3)
    return play(player, settings, progress)

  def wait_and_tell(self):
    if self.keeps() & {4} and 2 in [record['update'] for record in evaluator.read(tmp_path)]:
      pending.set()
    before_save(self)

  monkeypatch.setattr(evaluation, 'play', slow)
  monkeypatch.setattr(evaluator.Evaluator, 'before_save', wait_and_tell)
  assert train_in(tmp_path, changed(CONFIG, **EVAL))
  waits_s = {line['update']: line['eval_wait_s']
             for line in journal.read_lines(tmp_path / journal.METRICS)}
  assert waits_s[7] > 0.2 and waits_s[1] == waits_s[2] == waits_s[8] == 0


def test_an_evaluation_interrupted_by_a_stop_is_made_later(uninterrupted, tmp_path, monkeypatch):
  """A stop does not wait for a long evaluation, and keeps its checkpoint for later."""
  play = evaluation.play
  playing = threading.Event()

  def slow(player, settings, progress):
    if settings.index < 4:
      return play(player, settings, progress)
    playing.set()
    while True:
      progress(0)
      time.sleep(0.01)

  def stops(record):
    if record['update'] == 5 and playing.wait(60):
      return STOP
    return None

  config = changed(CONFIG, **EVAL)
  monkeypatch.setattr(evaluation, 'play', slow)
  assert not train_in(tmp_path, config, stops)
  assert [record['update'] for record in evaluator.read(tmp_path)] == [2]
  stopped = max(receipts(tmp_path))
  assert set(checkpoints.saved_updates(tmp_path)) == {2, 4, stopped}
  monkeypatch.setattr(evaluation, 'play', play)
  assert train_in(tmp_path, config)
  assert curve(tmp_path)[:2] == curve(uninterrupted[0])[:2]
  assert 4 not in set(checkpoints.saved_updates(tmp_path)) - {evaluator.best_update(tmp_path)}


def test_an_evaluation_that_has_ended_is_told_at_a_stop(tmp_path):
  told = []

  class Stops(Sink):
    def update(self, record, receipt):
      until = time.monotonic() + 60
      while record['update'] == 5 and len(evaluator.read(tmp_path)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
      return STOP if record['update'] == 5 else None

    def evaluated(self, record):
      told.append(record['update'])

  assert not train_in(tmp_path, changed(CONFIG, **EVAL), Stops())
  assert told == [record['update'] for record in evaluator.read(tmp_path)] == [2, 4]


def test_a_last_evaluation_that_a_stop_cut_is_told_as_any_other(uninterrupted, tmp_path,
                                                                monkeypatch):
  play = evaluation.play
  last = max(receipts(uninterrupted[0]))
  told = []

  def slow(player, settings, progress):
    while settings.index == last:
      progress(0)
      time.sleep(0.01)
    return play(player, settings, progress)

  class Told(Sink):
    def begin(self, start):
      told.append(('begin', start.update, bool(start.header)))

    def update(self, record, receipt):
      if record['update'] < last:
        return None
      until = time.monotonic() + 60
      while len(evaluator.read(tmp_path)) < last // 2 - 1:  # only the last one is to be cut
        assert time.monotonic() < until
        time.sleep(0.01)
      return STOP

    def evaluated(self, record):
      told.append(('evaluated', record['update']))

    def close(self):
      told.append('close')

  config = changed(CONFIG, **EVAL)
  monkeypatch.setattr(evaluation, 'play', slow)
  assert not train_in(tmp_path, config, Told())
  assert ('evaluated', last) not in told
  told.clear()
  monkeypatch.setattr(evaluation, 'play', play)
  for _ in range(2):  # nothing is left for the second command
    assert train_in(tmp_path, config, Told())
    assert told == [('begin', last, False), ('evaluated', last), 'close']
  assert curve(tmp_path) == curve(uninterrupted[0])
  points = [event.step for event in tensorboard_events(tmp_path / 'tensorboard')
            for value in event.summary.value if value.tag == 'eval/episodic_return']
  assert len(points) == len(set(points)) == len(curve(tmp_path))


def test_evaluations_after_a_broken_checkpoint_are_dropped(uninterrupted, tmp_path):
  def crashes(record):
    if record['update'] == 8:
      raise RuntimeError('crash')

  config = changed(CONFIG, checkpoint__keep=3, **EVAL)
  with pytest.raises(CallbackFailed):
    train_in(tmp_path, config, crashes)
  (tmp_path / 'checkpoints' / '6' / 'manifest.json').write_text('{')
  train_in(tmp_path, config)
  assert curve(tmp_path) == curve(uninterrupted[0])


def test_a_failed_evaluation_does_not_end_the_training(tmp_path, monkeypatch):
  monkeypatch.setattr(evaluation, 'CHUNK', 3)  # no episode of CartPole ends in three steps
  callback_records = []

  class Record(Sink):
    def evaluated(self, record):
      callback_records.append(record)

  assert train_in(tmp_path, changed(CONFIG, eval__max_steps=2, **EVAL), Record())
  records = evaluator.read(tmp_path)
  assert len(records) == len(callback_records) == 6
  assert all('max_steps is 2' in record['error'] and 'mean' not in record for record in records)
  with pytest.raises(ValueError, match='no checkpoint in .* was evaluated'):
    evaluator.best_update(tmp_path)


def test_an_evaluation_with_a_nan_is_an_error_and_not_the_best(tmp_path, monkeypatch):
  play = evaluation.play

  def play_with_nan_first(player, settings, progress):
    episodes = play(player, settings, progress)
    is_second = settings.index == 2
    return episodes._replace(returns=[NAN, *episodes.returns[1:]]) if is_second else episodes

  monkeypatch.setattr(evaluation, 'play', play_with_nan_first)
  assert train_in(tmp_path, changed(CONFIG, **EVAL))

  def refuse(constant):
    raise ValueError(f'{constant} is no JSON')

  lines = (tmp_path / evaluator.NAME).read_text().splitlines()
  first, *others = [json.loads(line, parse_constant=refuse) for line in lines]
  assert first['mean'] is None and 'the returns of 1 of 5 episodes are not finite' in first['error']
  assert all('error' not in record for record in others)
  assert evaluator.best_update(tmp_path) != 2
  assert 2 not in checkpoints.saved_updates(tmp_path)


def test_a_file_that_cannot_be_written_ends_the_run(tmp_path):
  (tmp_path / evaluator.NAME).mkdir()
  with contextlib.suppress(OSError):
    evaluator.read(tmp_path)
  with pytest.raises(OSError, match='evaluations.jsonl'):
    train_in(tmp_path, changed(CONFIG, **EVAL))


def test_a_file_system_that_does_not_answer_ends_the_run(tmp_path, monkeypatch):
  def times_out(path, line):
    raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))

  monkeypatch.setattr(evaluator.files, 'append_line', times_out)
  with pytest.raises(NotSaved, match='timed out: .*evaluations.jsonl'):
    train_in(tmp_path, changed(CONFIG, **EVAL))


def test_a_resumed_run_may_begin_to_evaluate(tmp_path):
  """The fields of `eval` are not part of the experiment, so a resumed run may change them."""
  def stops(record):
    return STOP if record['update'] == 3 else None

  train_in(tmp_path, CONFIG, stops)
  assert train_in(tmp_path, changed(CONFIG, eval__every_updates=5, eval__num_episodes=2))
  updates = [record['update'] for record in evaluator.read(tmp_path)]
  assert updates[-1] == max(receipts(tmp_path))
  assert all(after - before >= 5 for before, after in zip(updates[:-1], updates[1:-1],
                                                          strict=False))
  config = json.loads((tmp_path / 'config.json').read_text())['config']
  assert config['eval']['every_updates'] == 5  # those of the newest start are noted


def test_evaluations_do_not_depend_on_when_the_run_is_saved(uninterrupted, tmp_path):
  config = changed(CONFIG, **EVAL, checkpoint__every_updates=3, checkpoint__every_seconds=1e-6)
  assert train_in(tmp_path, config)
  assert curve(tmp_path) == curve(uninterrupted[0])
  assert receipts(tmp_path) == receipts(uninterrupted[0])


def test_an_evaluation_is_told_once_it_has_ended_although_later_ones_have_not(
    tmp_path, monkeypatch):
  """A run that resumes may make up for several evaluations."""
  told = []
  may_end = threading.Event()
  play = evaluation.play

  def slow(player, *args):
    if player.update == 4:
      assert may_end.wait(60)
    return play(player, *args)

  monkeypatch.setattr(evaluation, 'play', slow)
  run = prepared(changed(CONFIG, **EVAL))
  evaluating = evaluator.Evaluator(run, tmp_path, lambda: False, lambda line: None,
                                   lambda record, line: told.append(record['update']))
  params = run.learner.algorithm.acting(run.initial_state())
  for update in (2, 4):
    evaluating._begin(params, update, 64 * update)  # noqa: SLF001 - as `resume` does
  deadline_s = time.monotonic() + 60
  while not told and time.monotonic() < deadline_s:
    evaluating.before_save()
    time.sleep(0.05)
  assert told == [2] and evaluating.has_more
  may_end.set()
  evaluating.wait()
  assert told == [2, 4] and not evaluating.has_more
  evaluating.close()
