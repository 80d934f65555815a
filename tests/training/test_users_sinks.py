"""Sinks of a user: what they are told and when, and what happens if they stop, fail or are slow."""

import dataclasses
import inspect
import json
import sys
import time

import pytest

from podracer_jit.training import sinks, trainer
from podracer_jit.workdir import checkpoints, journal
from tests import processes, runs
from tests.runs import changed, fresh, open_workdir, prepared, small, train_in
from tests.training.fake_program import STEPS, FakeProgram

CONFIG = changed(small(), total_steps=4 * STEPS, env__renew_every_updates=2,
                 checkpoint__every_updates=2, checkpoint__keep=1, network__hidden=(2,),
                 log__tensorboard=False)


class Told(sinks.Sink):
  """Writes down what it is told; `answer` is returned to the event `asks`."""

  def __init__(self, asks='', answer=None):
    self.events = []
    self._asks = asks
    self._answer = answer

  def _tell(self, event, *what):
    self.events.append((event, *what))
    if event == self._asks:
      if isinstance(self._answer, BaseException):
        raise self._answer
      return self._answer
    return None

  def begin(self, start):
    return self._tell('begin', start.update, start.steps, start.header['first_update'])

  def update(self, record, receipt):
    return self._tell('update', record.pop('update'), receipt.pop('update'))

  def before_save(self):
    return self._tell('before_save')

  def saved(self, at):
    assert at.params is not None
    return self._tell('saved', at.update, at.steps)

  def note(self, line):
    return self._tell('note', line)

  def close(self):
    return self._tell('close')


@pytest.fixture(scope='module')
def run():
  return fresh(CONFIG)


@pytest.fixture
def train(run, tmp_path, monkeypatch):
  """Returns a function that trains with callbacks, with a program of numbers."""
  monkeypatch.setattr(trainer, 'GraphProgram', FakeProgram)
  open_workdir(tmp_path / 'run', CONFIG)

  def train(*callbacks):
    return train_in(run, tmp_path / 'run', callbacks)

  return train


def test_a_sink_is_told_the_events_in_order(train, tmp_path):
  told = Told()
  assert train(told)
  assert told.events == [
      ('begin', 0, 0, 1), ('update', 1, 1), ('update', 2, 2), ('before_save',),
      ('saved', 2, 2 * STEPS),
      ('begin', 2, 2 * STEPS, 3), ('update', 3, 3), ('update', 4, 4), ('before_save',),
      ('saved', 4, 4 * STEPS), ('before_save',), ('close',)]
  # Records and receipts are copies.
  assert list(journal.read_receipts(tmp_path / 'run').by_update) == [1, 2, 3, 4]


@pytest.mark.parametrize('event, last', [('begin', 1), ('update', 1), ('before_save', 2),
                                         ('saved', 2)])
def test_each_event_may_stop_the_run_which_goes_on_later(event, last, train, tmp_path):
  assert not train(Told(event, sinks.STOP))
  assert max(journal.read_receipts(tmp_path / 'run').by_update) == last
  assert train()


@pytest.mark.parametrize('event, update', [('begin', 0), ('update', 1), ('before_save', None),
                                           ('saved', 2), ('close', None)])
def test_a_sink_that_fails_ends_the_run_and_is_named(event, update, train, tmp_path):
  told = Told(event, KeyError('mine'))
  where = '' if update is None else f', update {update}'
  with pytest.raises(sinks.CallbackFailed, match=(
      rf"^callback Told\.{event}{where}: KeyError: 'mine'; the last good checkpoint is")):
    train(told)
  assert told.events[-1] == ('close',)
  assert train()
  assert list(journal.read_receipts(tmp_path / 'run').by_update) == [1, 2, 3, 4]


@pytest.mark.parametrize('event', ['begin', 'update', 'before_save', 'saved'])
def test_a_sink_that_exits_ends_the_run_and_the_same_call_goes_on(event, train):
  with pytest.raises(SystemExit):
    train(Told(event, SystemExit(3)))
  assert train()


def test_a_sink_that_fails_to_close_does_not_hide_why_the_run_has_failed(train, caplog):
  class Fails(Told):
    def close(self):
      raise OSError('the tracker is gone')

  with pytest.raises(sinks.CallbackFailed, match='KeyError: 1; the last good'):
    train(Fails('update', KeyError(1)))
  assert [record.getMessage() for record in caplog.records if 'tracker' in record.getMessage()] == [
      'CallbackFailed: callback '
      'test_a_sink_that_fails_to_close_does_not_hide_why_the_run_has_failed.<locals>.Fails.close: '
      'OSError: the tracker is gone']


def test_a_sink_that_never_began_is_not_closed(train):
  assert train()
  told = Told()
  assert train(told)  # the run has finished
  assert told.events == [('before_save',)]


def test_a_signal_while_a_sink_closes_leaves_the_run_finished(train):
  class Closes(sinks.Sink):
    def close(self):
      raise KeyboardInterrupt

  assert train(Closes())


def test_a_stop_at_the_end_of_a_stage_ends_the_run(tmp_path, monkeypatch):
  """Checkpoints since a change of the config after update 4 are lost, so there are two stages."""
  monkeypatch.setattr(trainer, 'GraphProgram', FakeProgram)
  first = changed(CONFIG, total_steps=8 * STEPS, checkpoint__keep=9)
  run = fresh(changed(first, loss__entropy_coef=0.5))
  assert not runs.train(fresh(first), tmp_path, callbacks=[runs.StopAt(4)])
  assert runs.train(run, tmp_path, change=['loss.entropy_coef'])
  for update in (4, 6, 8):
    (tmp_path / 'checkpoints' / str(update) / checkpoints.MANIFEST).unlink()
  assert not runs.train(run, tmp_path, callbacks=[Told('saved', sinks.STOP)])
  assert max(journal.read_receipts(tmp_path).by_update) == 4
  assert runs.train(run, tmp_path)


class Keeping(sinks.Sink):
  """Keeps the checkpoint of update 2."""

  def keeps(self):
    return [2]


class Confused(sinks.Sink):
  """Keeps nothing that is a number."""

  def keeps(self):
    return ['best']


def test_a_sink_keeps_checkpoints(train, tmp_path):
  with pytest.raises(sinks.CallbackFailed, match='^callback Confused.keeps: ValueError: '):
    train(Confused())
  assert train(Keeping())
  assert checkpoints.saved_updates(tmp_path / 'run') == [2, 4]
  assert CONFIG['checkpoint']['keep'] == 1


def test_a_sink_that_returns_something_else_is_refused(train):
  with pytest.raises(sinks.CallbackFailed, match=r'update 1: returned 5; it must return nothing'):
    train(Told('update', 5))


class Renamed(sinks.Sink):
  """Has a method of version 0.6."""

  def on_update(self, record):
    """Is never called."""


class Needs(sinks.Sink):
  """Cannot be made without arguments."""

  def __init__(self, url):
    self.url = url


@pytest.mark.parametrize('callback, message', [
    (5, 'each must be a function, a Sink or a class of sinks, got 5'),
    (dict, r"got <class 'dict'>"),
    (f'{__name__}:CONFIG', 'each must be a function, a Sink or a class of sinks'),
    (f'{__name__}:Missing', 'Missing'),
    ('nowhere_at_all:Sink', 'nowhere_at_all'),
    (Renamed, r'on_update of .* is called update\(record, receipt\) since version 0.7'),
    (Renamed(), 'on_update of .* is called update'),
    (Needs, 'Needs cannot be made without arguments: TypeError')])
def test_what_is_no_sink_is_refused_in_one_line(callback, message):
  with pytest.raises(ValueError, match=f'^callbacks: .*{message}') as error:
    sinks.users([callback])
  assert '\n' not in str(error.value)


def test_a_class_of_sinks_gives_each_run_its_own_instance_and_an_instance_is_shared():
  told = Told()
  first, second = sinks.users([told, f'{__name__}:Told'], num_runs=2)
  for seed, (shared, own) in enumerate([first, second], 1):
    for sink in (shared, own):
      sink.begin(sinks.Start('workdir', 0, seed, 0, 0, dict(first_update=1)))
      sink.update(dict(update=seed), dict(update=seed))
  assert [event[1] for event in told.events if event[0] == 'update'] == [1, 2]
  for sink in (*first, *second):
    sink.close()
  assert [event[0] for event in told.events].count('close') == 1
  seeds = []
  shared, = sinks.users([lambda record: seeds.append(record['seed'])], num_runs=2)[1]
  shared.begin(sinks.Start('workdir', 0, 7, 0, 0, {}))
  shared.update(dict(update=1), {})
  assert seeds == [7]


def test_a_sink_that_is_slower_than_updates_changes_nothing(tmp_path):
  """Real training: the learner waits for the writer, and the bits are the same."""
  receipts = []
  config = changed(small(), total_steps=300, checkpoint__every_updates=3, log__tensorboard=False)
  for name, callbacks in (('fast', []), ('slow', [lambda record: time.sleep(0.1)])):
    open_workdir(tmp_path / name, config)
    run = prepared(config)
    assert train_in(dataclasses.replace(run), tmp_path / name, callbacks)
    receipts.append(journal.read_receipts(tmp_path / name).by_update)
  assert receipts[0] == receipts[1] and len(receipts[0]) > 3


SINK = '''
import json
from podracer_jit import Sink

class Tracker(Sink):
  def begin(self, start):
    self.seed = start.seed
    self.updates = []
  def update(self, record, receipt):
    self.updates.append(record['update'])
  def close(self):
    with open(f'told{self.seed}.json', 'w') as file:
      json.dump(self.updates, file)
'''


@pytest.mark.parametrize('args', [
    [], ['--num_seeds=2', '--config.env.task=gymnax:Catch-bsuite', '--config.scheme=fused']])
def test_the_command_takes_a_class_of_sinks_by_its_name(args, tmp_path):
  (tmp_path / 'mine.py').write_text(SINK)
  result = processes.run(
      [sys.executable, '-P', '-m', 'podracer_jit', '--config=ppo_cartpole:smoke',
       '--config.network.hidden=(16,)', '--config.total_steps=512', '--callbacks=mine:Tracker',
       '--workdir=run', *args], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  for seed in range(1, 3 if args else 2):
    updates = json.loads((tmp_path / f'told{seed}.json').read_text())
    assert updates == list(range(1, len(updates) + 1)) != []


def test_a_users_sink_is_told_all_that_a_sink_can_be_told():
  arguments = dict(
      begin=(sinks.Start('workdir', 0, 1, 0, 0, {}),), replaying=(1, 2),
      update=({'update': 1}, {'update': 1}), before_save=(),
      saved=(sinks.Saved('workdir', 1, 8, None),), evaluated=({'update': 1},), note=('line',),
      keeps=(), close=())
  assert set(arguments) == {name for name, _ in inspect.getmembers(sinks.Sink, inspect.isfunction)
                            if not name.startswith('_')}
  told = []
  methods = {name: lambda self, *_, name=name: told.append(name) or ([] if name == 'keeps' else
                                                                     None)
             for name in arguments}
  (sink,), = sinks.users([type('All', (sinks.Sink,), methods)])
  for name, values in arguments.items():
    getattr(sink, name)(*values)
  assert told == list(arguments)
