"""wandb and trackio without a network, and a tracker of a user's own."""

import json
import struct

import pytest

from podracer_jit import metrics
from podracer_jit.errors import Refused
from podracer_jit.experiment.resolve import resolve
from podracer_jit.training import trackers, trainer
from podracer_jit.training.sinks import Sink, Start
from podracer_jit.workdir import journal
from podracer_jit.workdir.workdir import make_request
from tests.runs import changed, fresh, small, train

CONFIG = changed(small(task='Catch-v0'), total_steps=400, checkpoint__every_updates=3,
                 log__tensorboard=False, eval__every_updates=3, eval__num_episodes=2,
                 eval__num_envs=1, eval__video_every=10)


def blocks(data):
  """Yields the records of a file of wandb, which are LevelDB's, without their checksums."""
  size = 2**15
  place = 7  # a header of wandb's
  whole = b''
  while place + 7 <= len(data):
    left = size - place % size
    if left < 7:
      place += left
      continue
    length, kind = struct.unpack('<HB', data[place + 4:place + 7])
    whole += data[place + 7:place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # whole, or the last part
      yield whole
      whole = b''


def of_wandb(workdir):
  """Returns the ids of all runs, their newest config, and all points as dicts."""
  from wandb.proto import wandb_internal_pb2
  ids, config, points = set(), {}, []
  for path in sorted(workdir.glob('wandb/offline-run-*/*.wandb')):
    for block in blocks(path.read_bytes()):
      record = wandb_internal_pb2.Record.FromString(block)
      if record.HasField('run'):
        ids.add(record.run.run_id)
      for item in (*record.run.config.update, *record.config.update):
        config[item.key or tuple(item.nested_key)] = json.loads(item.value_json)
      if record.HasField('history'):
        points.append({item.key or '/'.join(item.nested_key): json.loads(item.value_json)
                       for item in record.history.item})
  return ids, config, points


@pytest.fixture
def offline(monkeypatch):
  """wandb sends nothing, and measures nothing of the machine."""
  pytest.importorskip('wandb')
  for name in ('X_DISABLE_STATS', 'X_DISABLE_META', 'X_DISABLE_MACHINE_INFO', 'DISABLE_GIT'):
    monkeypatch.setenv(f'WANDB_{name}', 'true')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setattr(trackers, 'TRACKED_S', 0.0)


def test_wandb_has_one_run_with_config_metrics_evaluations_and_video(offline, tmp_path):
  workdir = tmp_path / 'run'
  config = changed(CONFIG, log__tracker='wandb')
  assert not train(fresh(config), workdir, stop=3)
  assert train(fresh(config), workdir)
  ids, shown, points = of_wandb(workdir)
  assert ids == {json.loads((workdir / trackers.RUNS).read_text())['wandb']}
  assert shown['env']['task'] == 'Catch-v0' and shown['seed'] == 1

  lines = journal.read_lines(workdir / journal.METRICS)
  by_steps = {point['steps']: point for point in points if 'losses/policy_loss' in point}
  assert by_steps.keys() == {line['steps'] for line in lines}
  for line in lines:
    point = by_steps[line['steps']]
    assert point['losses/value_loss'] == line['baseline_loss']
    assert point['charts/episodes'] == line['episodes']
    assert 'update' not in point
  evaluations = journal.read_lines(workdir / 'evaluations.jsonl')
  assert {(point['steps'], point['eval/episodic_return']) for point in points
          if 'eval/episodic_return' in point} == {
              (line['steps'], line['mean']) for line in evaluations}
  videos = [point for point in points if any(name.startswith('eval/video') for name in point)]
  assert len(videos) == sum('video' in line for line in evaluations) > 0


def test_trackio_has_one_run_with_config_metrics_evaluations_and_video(tmp_path, monkeypatch):
  monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))  # read by the import
  trackio = pytest.importorskip('trackio')
  monkeypatch.setattr(trackers, 'TRACKED_S', 0.0)
  workdir = tmp_path / 'run'
  config = changed(CONFIG, log__tracker='trackio')
  assert not train(fresh(config), workdir, stop=3)
  assert train(fresh(config), workdir)
  (run,) = trackio.Api().runs('podracer_jit')
  assert run.name == json.loads((workdir / trackers.RUNS).read_text())['trackio']
  assert run.config['env']['task'] == 'Catch-v0'

  from trackio.sqlite_storage import SQLiteStorage
  points = SQLiteStorage.get_logs('podracer_jit', run.name)
  lines = journal.read_lines(workdir / journal.METRICS)
  shown = {(point['step'], point['losses/value_loss']) for point in points
           if 'losses/value_loss' in point}
  assert shown == {(line['steps'], line['baseline_loss']) for line in lines}
  evaluations = journal.read_lines(workdir / 'evaluations.jsonl')
  assert {(point['step'], point['eval/episodic_return']) for point in points
          if 'eval/episodic_return' in point} == {
              (line['steps'], line['mean']) for line in evaluations}
  assert sum('eval/video' in point for point in points) == sum(
      'video' in line for line in evaluations) > 0


class Own(trackers.Tracker):
  """A tracker as a user may write it."""

  def __init__(self):
    super().__init__(None, 0.0)
    self.points = []
    self.configs = []

  def show(self, numbers, steps):
    self.points.append((steps, numbers))

  def show_config(self, config, steps):
    self.configs.append(config)


@pytest.mark.quick
def test_a_users_tracker_is_a_sink():
  tracker = Own()
  assert isinstance(tracker, Sink)
  for update in (0, 5):
    tracker.begin(Start(None, 0, 1, update, 0, {}, {'seed': 1}))
  tracker.update(dict(update=1, steps=8, episode_return=None, loss=0.5, mine=2, warning='x'), {})
  tracker.evaluated(dict(update=1, steps=8, num_episodes=2, mean=3.0, error='no'))
  tracker.close()
  assert tracker.configs == [{'seed': 1}]
  assert tracker.points == [
      (8, {'losses/loss': 0.5, 'losses/mine': 2}),
      (8, {'eval/num_episodes': 2, 'eval/episodic_return': 3.0})]
  assert all(name.partition('/')[0] in ('losses', 'eval') for _, numbers in tracker.points
             for name in numbers) and metrics.shown('mine') == 'losses/mine'


def test_a_sink_gets_the_config(tmp_path):
  configs = []

  class Begun(Sink):
    def begin(self, start):
      configs.append(start.config)
      start.config['seed'] = 5  # a copy

  run = fresh(changed(CONFIG, eval__every_updates=0))
  assert not train(run, tmp_path / 'run', stop=1, callbacks=[Begun()])
  assert configs[0]['env']['task'] == 'Catch-v0' and run.experiment.fields['seed'] == 1


def test_a_run_keeps_its_name_in_a_tracker_and_a_new_run_has_another(tmp_path):
  (tmp_path / 'pong').mkdir()
  name = trackers._identity(tmp_path / 'pong', 'wandb', 0)
  assert name.startswith('pong-')
  other = trackers._identity(tmp_path / 'pong', 'trackio', 0)
  assert trackers._identity(tmp_path / 'pong', 'wandb', 7) == name
  assert trackers._identity(tmp_path / 'pong', 'trackio', 7) == other
  assert trackers._identity(tmp_path / 'pong', 'wandb', 0) != name
  (tmp_path / 'pong' / trackers.RUNS).write_text('[')
  assert trackers._identity(tmp_path / 'pong', 'wandb', 7) != name


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_begins(tmp_path, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  experiment = resolve(changed(CONFIG, log__tracker='wandb'))
  with pytest.raises(ValueError, match=r"^log.tracker: wandb is not installed; pip install "
                                       r"'.\[wandb\]' adds it$"), \
      trainer.opened(experiment, tmp_path / 'run', make_request()):
    pass
  assert not (tmp_path / 'run').exists()


def test_a_tracker_that_does_not_start_ends_the_run_in_one_line(monkeypatch):
  def fails(name):
    raise OSError('no\nlogin')

  monkeypatch.setattr('importlib.import_module', fails)
  with pytest.raises(Refused, match='^log.tracker: wandb does not start: OSError: no login$'), \
      trackers._starting('wandb'):
    pass
