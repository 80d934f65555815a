"""Records, files and the live display, from hand-made reports."""

import contextlib
import dataclasses
import io
import json
import re
import resource
import struct
import time
import types

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from podracer_jit import losses, schedules
from podracer_jit.errors import Diverged, NotSaved
from podracer_jit.experiment.resolve import resolve
from podracer_jit.schemes.reports import Report, Waits
from podracer_jit.training.meter import Meter, wall_clock
from podracer_jit.training.progress import Progress, bottleneck, waited
from podracer_jit.training.sinks import Finite, Journals, Standstill, Start
from podracer_jit.training.trackers import TensorBoard
from podracer_jit.types import Episodes
from tests.made import bound
from tests.runs import changed, small


def report(updates, cgd=1.5, valid=6, **fields):
  """Returns a report of 2 rows and 2 environments an update.

  In the last row of each update one episode ends, whose return is the number of the update.
  """
  n = len(updates)
  ended = np.zeros((n, 2, 2), bool)
  ended[:, 1, 0] = True
  episodes = Episodes(ended, np.broadcast_to(np.array(updates, np.float32)[:, None, None],
                                             ended.shape), np.full(ended.shape, 7))
  return Report(dict(
      update=np.array(updates), steps=np.array(updates) * valid, valid=np.full(n, valid),
      batch=np.zeros((n, 2), np.uint32), params=np.ones((n, 2), np.uint32), episodes=episodes,
      entropy=np.full(n, 0.5, np.float32)), n, (cgd,) * n, (0.25,) * n, **fields)


def meter(past=None, every=1, algorithm=None, window=2, **clock):
  """Returns a meter: a window of two episodes, four frames a step, and lines up to update 10."""
  experiment = types.SimpleNamespace(
      log=types.SimpleNamespace(window=window, every_updates=every),
      algorithm=algorithm or bound(losses.IMPALA()), env=types.SimpleNamespace(num_envs=2),
      total_steps=60,
      logs=lambda update, steps: update % every == 0 or update >= 10,
      spec=types.SimpleNamespace(frame_skip=4))
  return Meter(experiment, past or {}, **clock)


def test_records_count_episodes_frames_and_delays():
  m = meter()
  records = [r for r, _ in m.records(report([1, 2, 3], cgd=5.5))]
  assert [r['episode_return'] for r in records] == [1.0, 1.5, 2.5]  # window of two
  assert records[-1]['episodes'] == 3 and records[-1]['episode_length'] == 7.0
  assert records[-1]['frames'] == 4 * records[-1]['steps'] == 4 * 18
  assert records[0]['cgd'] == 5.5 and records[0]['gud'] == 0.25
  assert records[0]['entropy'] == 0.5
  (_, receipt), = m.records(report([4]))
  assert receipt == dict(update=4, batch='0' * 16, params='0000000100000001')


def of_envs(updates, ids):
  """Returns a report in which the episodes of two environments end with each update.

  Their returns are the number of the update, and ten times that; `ids` are the environments.
  """
  item = report(updates)
  numbers = np.array(updates, np.float32)[:, None]
  ended = np.ones((len(updates), 1, 2), bool)
  fault = np.zeros((len(updates), 1, 2, 5), np.int32)
  fault[..., 4] = ids
  item.metrics['episodes'] = Episodes(ended, (numbers * [1, 10])[:, None], ended.astype(int), fault)
  return item


def test_the_greediest_return_is_that_of_the_environments_that_explore_least():
  """Environment 1 has the smallest epsilon (1803.00933, section 4.1), in whatever column it is."""
  algorithm = bound(losses.DQN())
  first = meter(algorithm=algorithm)
  assert [r['greediest_return'] for r, _ in first.records(of_envs([1, 2], [0, 1]))] == [10.0, 15.0]
  assert [r['greediest_return'] for r, _ in first.records(of_envs([3], [1, 0]))] == [11.0]
  assert [r['greediest_return'] for r, _ in first.records(of_envs([4], [0, 7]))] == [11.0]
  # A run that goes on has the same window, of ten episodes: 8 of [10, 20, 3], and 13 to 20.
  second = meter(json.loads(json.dumps(first.meta())), algorithm=algorithm)
  *_, (last, _) = second.records(of_envs(range(13, 21), [1, 0]))
  assert last['greediest_return'] == np.mean([20, 3, *range(13, 21)])


@pytest.mark.parametrize('algorithm, expected', [
    (losses.IMPALA(), None), (losses.PQN(), None), (losses.DQN(epsilon_alpha=0.0), None),
    (losses.DQN(epsilon=0.0), None), (losses.DQN(epsilons=(0.4, 0.1)), 10.0),
    (losses.DQN(epsilons=(0.1, 0.4)), 1.0),
    (losses.DQN(epsilon=schedules.parse('linear:1:0.1')), 10.0)])
def test_there_is_no_greediest_return_if_environments_explore_alike(algorithm, expected):
  """With a schedule, epsilon is 1 everywhere at first; its value half way decides."""
  (record, _), = meter(algorithm=bound(algorithm, total_steps=60)).records(of_envs([1], [0, 1]))
  assert record.get('greediest_return') == expected
  assert ('greediest_return' in record) == (expected is not None)


def test_the_window_of_the_greediest_grows_with_that_of_all():
  """Half of 40 episodes are of one of two environments."""
  m = meter(algorithm=bound(losses.DQN()), window=40)
  *_, (last, _) = m.records(of_envs(range(1, 31), [1, 0]))
  assert last['greediest_return'] == np.mean(range(11, 31))
  (empty, _), = meter(algorithm=bound(losses.DQN())).records(of_envs([1], [0, 0]))
  assert empty['greediest_return'] is None


def test_a_state_that_is_not_finite_ends_the_run_after_its_record():
  item = report([1, 2, 3])
  item.metrics['finite'] = dict(moments=np.array([True, True, True]),
                                replay=np.array([True, False, True]))
  records = meter().records(item)
  assert [next(records)[0]['update'] for _ in range(2)] == [1, 2]
  with pytest.raises(Diverged, match=r'^update 2 \(12 steps\): the priorities of the replay'):
    next(records)


def test_a_line_covers_the_episodes_of_updates_that_have_none():
  """Update i ends one episode of return i; lines are those of updates 4, 8 and 10."""
  whole = [r for r, _ in meter(every=4).records(report(range(1, 11)))]
  assert [whole[i - 1]['episode_return'] for i in (4, 8, 10)] == [2.5, 6.5, 9.5]
  assert whole[3]['episode_length'] == 7.0 and whole[3]['episodes'] == 4
  # A run that goes on within an interval has the same lines.
  first = meter(every=4)
  list(first.records(report(range(1, 7))))
  second = meter(json.loads(json.dumps(first.meta())), every=4)
  rest = [r for r, _ in second.records(report(range(7, 11)))]
  assert [r['episode_return'] for r in rest] == [r['episode_return'] for r in whole[6:]]


class Clock(types.SimpleNamespace):
  """Replaces the module `time`: the seconds are set by the test."""

  def perf_counter(self):
    return self.seconds


@pytest.fixture
def clock(monkeypatch):
  clock = Clock(seconds=100.0)
  monkeypatch.setattr('podracer_jit.training.meter.time', clock)
  return clock


def sps_of(m, clock, times, count=1):
  """Returns the speeds in the records of reports of 6 steps an update at these seconds."""
  speeds = []
  for number, seconds in enumerate(times):
    clock.seconds = seconds
    updates = list(range(number * count + 1, (number + 1) * count + 1))
    speeds.append([record['sps'] for record, _ in m.records(report(updates))])
  return speeds


def test_reports_that_arrive_together_do_not_make_a_speed(clock):
  """An update takes a second. The writer pauses from 104 to 140 s, and finds two reports."""
  speeds = sps_of(meter(), clock, [101, 102, 103, 104, 140, 140.000001, 141, *range(142, 156)])
  speeds = [speed for (speed,) in speeds]
  assert speeds[:4] == [6.0] * 4
  # The pause counts, for all that was learned since the report before it.
  assert speeds[4:7] == pytest.approx([6 / 36, 12 / 36, 18 / 37])
  assert max(speeds) < 1.2 * 6
  assert speeds[-1] == 6.0


def test_the_speed_is_that_of_the_last_seconds_without_the_first_update(clock):
  """The first update takes 60 s, as it includes compilation; then the speed doubles."""
  times = [160, *(160 + i for i in range(1, 21)), *(180 + i / 2 for i in range(1, 41))]
  speeds = [speed for (speed,) in sps_of(meter(), clock, times)]
  assert speeds[0] == 0.1 and speeds[1:21] == [6.0] * 20
  assert speeds[21:] == sorted(speeds[21:]) and speeds[-1] == 12.0


def test_updates_of_one_call_have_its_speed_and_drawn_transitions_too(clock):
  m = meter()
  assert sps_of(m, clock, [101, 103], count=2) == [[12.0] * 2, [6.0] * 2]
  clock.seconds = 105
  item = report([5, 6])
  item.metrics['sampled'] = np.array([0, 40])
  assert [record['samples_per_s'] for record, _ in m.records(item)] == [10.0] * 2


def test_the_wall_clock_goes_on_with_the_run_and_counts_no_time_between_commands(clock):
  clock.seconds = 107
  first = meter(wall_s=wall_clock({}, began_s=100.0))
  clock.seconds = 117  # 7 s until the segment began, 10 s of the first update
  (record, _), = first.records(report([1]))
  assert record['wall_s'] == 17 and record['elapsed_s'] == 10
  clock.seconds = 120
  past = json.loads(json.dumps(first.meta()))
  clock.seconds = 5005  # the next command began at 5000
  second = meter(past, wall_s=wall_clock(past, began_s=5000.0))
  clock.seconds = 5009
  (record, _), = second.records(report([2]))
  assert record['wall_s'] == 20 + 9 and record['elapsed_s'] == 10 + 4
  # A checkpoint of an earlier version.
  assert wall_clock({'elapsed_s': 3.0}, began_s=5000.0)() == 3 + 9


def test_a_warning_names_the_seed(capsys):
  standstill = Standstill('seed 3')
  for update in range(1, 13):
    standstill.update(dict(update=update, grad_norm=0.0), dict(params=str(update)))
  assert capsys.readouterr().err.startswith(
      'podracer_jit: warning: seed 3, update 10: the gradient was exactly 0 in 10 updates')


def notices(capsys, records, params=None):
  """Returns the lines that are printed, and whether each record has a warning."""
  standstill = Standstill()
  params = params or range(len(records))  # they move
  records = [dict(update=i, learning_rate=1e-3, grad_norm=1.0) | record
             for i, record in enumerate(records, 1)]
  for record, each in zip(records, params, strict=True):
    standstill.update(record, dict(params=str(each)))
  return (re.findall(r'^podracer_jit: warning: update \d+: (.*)$', capsys.readouterr().err, re.M),
          ['warning' in record for record in records])


def test_a_gradient_of_zero_is_noticed_after_ten_updates(capsys):
  zero = dict(grad_norm=0.0)
  line = ('the gradient was exactly 0 in 10 updates in a row, so nothing is learned; does the loss '
          'depend on the parameters?')
  assert notices(capsys, [zero] * 12 + [{}] + [zero] * 10) == (
      [line] * 2, [False] * 9 + [True] * 3 + [False] * 10 + [True])
  assert notices(capsys, [zero] * 9 + [{}] + [zero] * 9) == ([], [False] * 19)
  # Parameters that do not move either are no second warning.
  assert notices(capsys, [zero] * 12, ['a'] * 12)[0] == [line]


def test_parameters_that_do_not_move_are_noticed_after_ten_updates(capsys):
  # The first update has none before it to compare with.
  lines, warned = notices(capsys, [{}] * 12 + [{}] * 2, ['a'] * 12 + ['b', 'c'])
  assert lines == ['the parameters did not change in 10 updates in a row, though the learning rate '
                   'is 0.001']
  assert warned == [False] * 10 + [True] * 2 + [False] * 2


def test_a_run_that_goes_on_counts_on(capsys):
  whole = Standstill()
  first = Standstill()
  records = [dict(update=update, grad_norm=0.0, learning_rate=0.1) for update in range(1, 13)]
  expected, resumed = ([dict(record) for record in records] for _ in range(2))
  receipts = [dict(params='a')] * 12
  for record, receipt in zip(expected, receipts, strict=True):
    whole.update(record, receipt)
  for record, receipt in zip(resumed[:6], receipts, strict=False):
    first.update(record, receipt)
  then = Standstill(past=json.loads(json.dumps(first.meta())))
  for record, receipt in zip(resumed[6:], receipts, strict=False):
    then.update(record, receipt)
  assert resumed == expected and 'warning' in expected[9]
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 2 and lines[0] == lines[1]


def test_there_is_no_delay_without_a_gradient():
  """Before a replay is filled, updates draw nothing."""
  waits = report([1], cgd=4.0)
  draws = report([2], cgd=4.0)
  for item, sampled, age in ((waits, 0.0, 0.0), (draws, 32.0, 2.5)):
    item.metrics.update(sampled=np.array([sampled]), sampled_age=np.array([age]))
  m = meter()
  assert [next(m.records(item))[0]['cgd'] for item in (waits, draws)] == [0.0, 6.5]


@pytest.mark.parametrize('records', [
    [dict(learning_rate=0.0)] * 30,  # annealed to the end
    [dict(grad_norm=0.0, sampled=0.0)] * 30])  # a replay that is still filled
def test_no_warning_where_nothing_can_be_learned(records, capsys):
  assert notices(capsys, records, ['a'] * len(records)) == ([], [False] * len(records))


def test_waits_count_from_the_last_report():
  m = meter()
  first = next(m.records(report([1], waits=Waits(1.0, 0.5))))[0]
  second = [r for r, _ in m.records(report([2, 3], waits=Waits(4.0, 0.5)))]
  assert (first['actor_wait_s'], first['learner_wait_s']) == (1.0, 0.5)
  assert [(r['actor_wait_s'], r['learner_wait_s']) for r in second] == [(1.5, 0.0)] * 2


CLUSTER = dict(actors_alive=3, actors_pending=1, actor_restarts=2, cluster_mb_per_s=12.34,
               cluster_get_ms=0.56)


def test_an_update_does_not_count_the_start_of_the_environments(clock):
  """The segment begins at 100 s, and its environments and programs are ready at 107 s."""
  m = meter()
  m.begin()
  clock.seconds = 109
  (record, _), = m.records(report([1], since_s=107.0))
  assert record['elapsed_s'] == 2 and record['sps'] == 3


def test_what_sinks_add_to_a_record_is_no_loss():
  record = dict(update=3, steps=9, gud=0.0, loss=float('nan'), warning='a line', eval_wait_s=0.5)
  with pytest.raises(Diverged, match=r'^update 3 \(9 steps\): loss not finite \(loss nan\)$'):
    Finite().update(record, {})


def test_new_lives_are_in_the_next_receipt():
  m = meter()
  m.begin({'actor 1': 1})  # which the segment's header has
  records, receipts = zip(*[
      next(m.records(report([update], machines=CLUSTER, lives={'actor 1': life})))
      for update, life in ((1, 1), (2, 2), (3, 2))], strict=True)
  assert [receipt.get('lives') for receipt in receipts] == [None, {'actor 1': 2}, None]
  assert records[0]['cluster_mb_per_s'] == 12.34 and records[0]['actors_pending'] == 1


def test_without_an_episode_the_return_is_null():
  item = report([1])
  item.metrics['episodes'].ended[:] = False
  assert next(meter().records(item))[0]['episode_return'] is None


def test_a_meter_continues_from_its_saved_state():
  m = meter()
  list(m.records(report([1, 2])))
  resumed = meter(past=json.loads(json.dumps(m.meta())))
  record = next(resumed.records(report([3])))[0]
  assert record['episode_return'] == 2.5 and record['episodes'] == 3


def journals(workdir, update):
  """Returns the journals of a run that goes on from an update, with the header of a segment."""
  files = Journals(workdir, update)
  files.begin(Start(workdir, 0, 1, update, 0, dict(segment=update, first_update=update + 1)))
  return files


def test_a_beginning_without_a_segment_writes_no_line(tmp_path):
  files = Journals(tmp_path, 0)
  files.begin(Start(tmp_path, 0, 1, 0, 0, {}))
  files.close()
  assert (tmp_path / 'receipts.jsonl').read_text() == ''


def test_journals_drop_lines_after_the_last_checkpoint(tmp_path):
  files = journals(tmp_path, 0)
  for update in (1, 2, 3):
    files.update(dict(update=update, steps=0, x=float('nan')), dict(update=update))
  files.close()
  (tmp_path / 'metrics.jsonl').open('a').write('{"upd')
  files = journals(tmp_path, 2)
  assert files.problems == []
  files.update(dict(update=3, steps=0, x=1.0), dict(update=3))
  files.close()
  metrics = [json.loads(x) for x in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert metrics == [dict(update=update, steps=0, x=x) for update, x in (
      (1, None), (2, None), (3, 1.0))]
  receipts = [json.loads(x) for x in (tmp_path / 'receipts.jsonl').read_text().splitlines()]
  assert receipts == [dict(segment=0, first_update=1), dict(update=1), dict(update=2),
                      dict(segment=2, first_update=3), dict(update=3)]


def test_tensorboard_has_points_at_intervals_and_the_last_one(tmp_path, monkeypatch):
  clock = types.SimpleNamespace(perf_counter=lambda: 0.0, time=time.time)
  monkeypatch.setattr('podracer_jit.training.trackers.time', clock)
  events = TensorBoard(tmp_path, 0, 0)
  for update, seconds in enumerate([0.0, 0.05, 0.11, 0.12, 0.3, 0.35], 1):
    clock.perf_counter = lambda seconds=seconds: seconds
    events.update(dict(update=update, steps=10 * update, loss=0.5), dict(update=update))
  events.close()
  assert _points(tmp_path / 'tensorboard') == [('losses/loss', s) for s in (10, 30, 50, 60)]


def test_metrics_may_have_fewer_lines_which_count_all_waits(tmp_path):
  files = Journals(tmp_path, 0, lambda update, steps: update % 3 == 0 or steps >= 70)
  for update in range(1, 8):
    files.update(dict(update=update, steps=10 * update, eval_wait_s=1.0), dict(update=update))
  files.close()
  lines, receipts = ([json.loads(x) for x in (tmp_path / name).read_text().splitlines()]
                     for name in ('metrics.jsonl', 'receipts.jsonl'))
  assert [(x['update'], x['eval_wait_s']) for x in lines] == [(3, 3.0), (6, 3.0), (7, 1.0)]
  assert len(receipts) == 7


def test_tensorboard_has_the_config_as_text_and_as_hparams(tmp_path):
  events = TensorBoard(tmp_path, 0, 0)
  config = {'seed': 3, 'network': {'hidden': (8, 8)}, 'log': {'tensorboard': True}}
  for update in (0, 6):  # two segments
    events.begin(Start(tmp_path, 0, 3, update, 0, {}, config))
  events.close()
  values = [value for event in tensorboard_events(tmp_path / 'tensorboard')
            for value in event.summary.value]
  (text,) = (value for value in values if value.tag.startswith('config'))
  assert json.loads(text.tensor.string_val[0]) == {
      'seed': 3, 'network': {'hidden': [8, 8]}, 'log': {'tensorboard': True}}
  (start,) = (HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info
              for value in values if value.tag == '_hparams_/session_start_info')
  assert start.hparams['seed'].number_value == 3
  assert start.hparams['network.hidden'].string_value == '(8, 8)'
  assert start.hparams['log.tensorboard'].bool_value


def test_tensorboard_keeps_events_before_a_segment(tmp_path):
  """TensorBoard drops older events from the first step of a segment on."""
  for update, steps in ((0, 0), (2, 60)):
    TensorBoard(tmp_path, update, steps).close()
  begins = [event.step for event in tensorboard_events(tmp_path / 'tensorboard')
            if event.session_log.status == event_pb2.SessionLog.START]
  assert sorted(begins) == [1, 61]


def test_a_full_disk_is_an_error_of_tensorboard_and_no_hang(tmp_path):
  events = TensorBoard(tmp_path, 0, 0)
  events.before_save()
  (path,) = (tmp_path / 'tensorboard').iterdir()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, limits[1]))
    with pytest.raises(NotSaved, match=f'File too large: .*{path.parent}/events'):
      for update in range(10_000):  # whose points do not fit into a buffer of the file
        events.show({'losses/loss': 0.5}, update)
    for method in (events.before_save, events.close):
      with pytest.raises(NotSaved, match='File too large'):
        method()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _points(directory):
  """Returns (name, step) of all scalars."""
  return [(value.tag, event.step) for event in tensorboard_events(directory)
          for value in event.summary.value]


def tensorboard_events(directory):
  """Yields the events of TFRecord files; a record is length, checksum, event, checksum."""
  for path in directory.iterdir():
    data = path.read_bytes()
    while data:
      end = 12 + struct.unpack('<Q', data[:8])[0]
      yield event_pb2.Event.FromString(data[12:end])
      data = data[end + 4:]


@pytest.mark.quick
@pytest.mark.parametrize('actor,learner,message', [
    (5.0, 0.1, 'learner (the actors wait 50% of the time)'),
    (0.1, 4.0, 'actors (the learner waits 40% of the time)'),
    (0.1, 0.2, 'none (neither side waits)'),
    (6.0, 4.0, 'both take turns (acting 40% of the time, learning 60%)'),
])
def test_bottleneck_in_words(actor, learner, message):
  assert bottleneck(actor, learner, 10.0).startswith(message)


def test_waits_from_before_the_first_record_do_not_count():
  """The actor waited 40 s while the learner was compiled, and 0.1 s of each later second."""
  records = [(50.0, dict(actor_wait_s=0.0)), (51.0, dict(actor_wait_s=40.1)),
             (52.0, dict(actor_wait_s=0.1)), (53.0, dict(actor_wait_s=0.1))]
  assert waited(records, 'actor_wait_s') == pytest.approx(1.2)
  assert waited(records[1:], 'actor_wait_s') == pytest.approx(0.2)
  # A wait over several updates that began after the first record counts as a whole.
  records = [(0.0, dict(actor_wait_s=0.0)), (1.0, dict(actor_wait_s=0.0)),
             (2.0, dict(actor_wait_s=1.5))]
  assert waited(records, 'actor_wait_s') == 1.5


RECORD = dict(update=1, steps=50, frames=200, sps=10.0, episode_return=3.0, episode_length=9.0,
              episodes=4, actor_wait_s=0.0, learner_wait_s=0.0, cgd=5.5, gud=0.25, wall_s=3665.0,
              policy_loss=-0.012345, value_loss=0.5, entropy=0.6, approx_kl=0.00312)
EXPERIMENT = resolve(changed(small(), total_steps=100, log__every_seconds=1e-9))


@pytest.mark.parametrize('terminal', [False, True])
def test_progress_shows_the_main_figures(terminal, monkeypatch):
  out = io.StringIO()
  clock = iter(range(100))
  monkeypatch.setattr('podracer_jit.training.progress.time', types.SimpleNamespace(
      monotonic=lambda: float(next(clock)), strftime=__import__('time').strftime,
      gmtime=__import__('time').gmtime))
  console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
  with contextlib.closing(Progress(EXPERIMENT, 'a title', console)) as progress:
    progress.update(dict(RECORD), {})
    progress.update(dict(RECORD, steps=60, frames=240, actor_wait_s=0.9), {})
  text = ' '.join(out.getvalue().split())  # lines are cut at the console's width
  for part in ('60 of 100', '240', 'SPS', '3.00 (length 9, 4 episodes)',
               'elapsed 01:01:05', 'loss policy -0.0123, value 0.5', 'KL 0.0031',
               '5.5 gradient steps from collection to gradient (CGD), 0.2 from gradient to update '
               '(GUD)',
               'learner (the actors wait 90% of the time)'):
    assert part in text
  assert ('a title' in text) == terminal


def test_progress_shows_the_cluster():
  out = io.StringIO()
  progress = Progress(EXPERIMENT, 'a title', Console(file=out, width=120))
  progress.update(dict(RECORD, **CLUSTER), {})
  text = ' '.join(out.getvalue().split())
  assert 'cluster 3 processes, 1 pending, 2 restarts; 12.3 MB/s, 0.6 ms to get each' in text


@pytest.mark.parametrize('terminal', [False, True])
def test_progress_shows_compiling_and_no_time_left_before_the_first_update(terminal):
  """The time left cannot be known yet, since the first update includes compiling."""
  out = io.StringIO()
  console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
  with contextlib.closing(Progress(EXPERIMENT, 'a title', console)) as progress:
    progress.compiling()
    if terminal:
      time.sleep(0.5)  # the block is drawn four times a second
    progress.update(dict(RECORD), {})
    progress.finish('finished at update 1')
  text = out.getvalue()
  assert text.index('compiling ...') < text.index('50 of 100') < text.index('finished')
  assert 'left' not in text and 'SPS' not in text


@pytest.mark.parametrize('env_batch, words', [
    (0, 'Python steps them; results repeat'), (2, 'Python steps them; results do not repeat')])
def test_the_block_says_that_python_steps_the_environments(env_batch, words):
  out = io.StringIO()
  console = Console(file=out, force_terminal=True, width=120, highlight=False)
  experiment = dataclasses.replace(
      EXPERIMENT, spec=EXPERIMENT.spec._replace(calls_python=True), env_batch=env_batch)
  with contextlib.closing(Progress(experiment, 'a title', console)) as progress:
    progress.update(dict(RECORD), {})
  assert words in ' '.join(out.getvalue().split())


def test_the_last_update_is_shown_before_the_last_line():
  out = io.StringIO()
  experiment = resolve(changed(small(), total_steps=100, log__every_seconds=1e6))
  progress = Progress(experiment, 'a title', Console(file=out, width=120))
  progress.update(dict(RECORD), {})
  assert out.getvalue() == ''
  progress.finish('stopped at update 1')
  assert out.getvalue().index('50 of 100') < out.getvalue().index('stopped')
