"""Runs stopped at random: the checks find losses, and a real run passes them."""

import json
import random
import signal

import pytest

from benchmarks import kill_resume
from benchmarks.kill_resume import Files
from benchmarks.tests.run import run_benchmark
from podracer_jit.errors import INTERRUPTED, STOPPED
from podracer_jit.schemes.table import SCHEMES

EMPTY = Files('', '', [], set())


def receipt_lines(*updates, first=1, segment=0):
  """Returns the receipts of a segment with these updates, as lines."""
  header = dict(segment=segment, first_update=first, canary='c')
  receipts = [dict(update=n, batch=f'b{n}', params=f'p{n}') for n in updates]
  return [json.dumps(entry) + '\n' for entry in (header, *receipts)]


def metrics_lines(*updates):
  """Returns the metrics of these updates, as lines."""
  return [json.dumps(dict(update=n, steps=10 * n, sps=random.random())) + '\n' for n in updates]


def files(receipts=None, metrics=None, checkpoints=(2, 4), drafts=()):
  """Returns a finished run of two segments of two updates, with parts replaced."""
  receipts = receipts or receipt_lines(1, 2) + receipt_lines(3, 4, first=3, segment=1)
  metrics = metrics or metrics_lines(1, 2, 3, 4)
  return Files(''.join(metrics), ''.join(receipts), list(checkpoints), set(drafts))


def test_a_complete_run_has_no_problem():
  assert kill_resume.problem_at_end(files()) == ''
  assert kill_resume.problem_after_stop(files(), 4) == ''
  assert kill_resume.difference(files(), files()) == ''


@pytest.mark.parametrize('changed, message', [
    (dict(receipts=receipt_lines(1, 2, 4)), 'update 4 stands where update 3 was expected'),
    (dict(receipts=receipt_lines(1, 2, 2, 3, 4)), 'update 2 stands where update 3'),
    (dict(receipts=receipt_lines(1, 2, 4, 3)), 'update 4 stands where update 3'),
    (dict(receipts=receipt_lines(1, 2) + receipt_lines(3, 4, first=4)), 'begins with update 4'),
    (dict(receipts=[*receipt_lines(1, 2), '{"update": 3, "ba\n', *receipt_lines(3, 4, first=3)]),
     'receipts.jsonl: line 4 is garbled'),
    (dict(metrics=['null\n', *metrics_lines(1, 2, 3, 4)]), 'metrics.jsonl: line 1 is garbled'),
    (dict(metrics=metrics_lines(1, 2, 4)), 'metrics.jsonl: update 4 stands where update 3')])
def test_gaps_repetitions_and_garbled_lines_are_problems(changed, message):
  assert message in kill_resume.problem_at_end(files(**changed))
  assert message in kill_resume.problem_after_stop(files(**changed), 2)


@pytest.mark.parametrize('changed, message', [
    (dict(receipts=receipt_lines(1, 2, 3)), 'receipts.jsonl with 3'),
    (dict(metrics=[*metrics_lines(1, 2, 3, 4), '{"update"']), 'line 5 is garbled'),
    (dict(checkpoints=[2]), 'the newest checkpoint is that of update 2, the last update is 4'),
    (dict(metrics=['{"update": 1, "steps": 9}\n', '{"update": 2, "steps": 9}\n'],
          receipts=receipt_lines(1, 2), checkpoints=[2]), 'steps do not increase'),
    (dict(metrics=['\n']), 'no update')])
def test_an_incomplete_run_is_a_problem_at_its_end(changed, message):
  assert message in kill_resume.problem_at_end(files(**changed))


def test_a_stop_may_only_cut_the_last_line():
  cut = files(receipts=[*receipt_lines(1, 2, 3), '{"update": 4, "ba'])
  assert kill_resume.problem_after_stop(cut, 2).endswith('before the checkpoint of 4')
  assert kill_resume.problem_after_stop(cut._replace(checkpoints=[2]), 2) == ''


def test_a_lost_checkpoint_is_a_problem():
  assert 'update 6 is gone; the newest is that of 4' in kill_resume.problem_after_stop(files(), 6)
  without_checkpoints = files(checkpoints=())
  assert 'update 2 is gone' in kill_resume.problem_after_stop(without_checkpoints, 2)
  assert kill_resume.problem_after_stop(without_checkpoints, 0) == ''


def test_differences_of_bits_and_episodes_are_reported():
  receipts = [line.replace('p3', 'p9') for line in files().receipts.splitlines(keepends=True)]
  words = kill_resume.difference(files(), files(receipts=receipts))
  assert words == 'receipts.jsonl differs at update 3: params'
  metrics = [line.replace('"steps": 20', '"steps": 21') for line in metrics_lines(1, 2, 3, 4)]
  words = kill_resume.difference(files(), files(metrics=metrics))
  assert words == 'metrics.jsonl differs at update 2: steps'
  shorter = files(receipts=receipt_lines(1, 2, 3))
  assert 'has 3 updates, 4' in kill_resume.difference(files(), shorter)
  other_header = [line.replace('"c"', '"d"') for line in receipt_lines(1, 2, 3, 4)]
  assert kill_resume.difference(files(), files(receipts=other_header)) == ''


@pytest.mark.parametrize('output, newest, message', [
    ('going on from update 8 (300 steps)', 8, ''), ('Catch  runs/x: starting\n', 0, ''),
    ('', 8, ''),
    ('[1] warning\n[0] going on from update 8 (300 steps)', 16, 'from update 8, the newest'),
    ('Catch  runs/x: starting\nsteps 1', 8, 'from update 0, the newest checkpoint was that of 8')])
def test_a_run_must_go_on_from_its_newest_checkpoint(output, newest, message):
  problem = kill_resume.resume_problem(output, newest)
  assert message in problem and bool(message) == bool(problem)


@pytest.mark.parametrize('code, number, output, left, message', [
    (STOPPED, signal.SIGTERM, 'x: starting\n', files(), ''),
    (STOPPED, signal.SIGINT, 'x: starting\n', files(checkpoints=[2]),
     'exit code 3 after update 4, though the newest checkpoint is that of 2'),
    (STOPPED, signal.SIGINT, 'x: starting\n', EMPTY, 'exit code 3 after update 0'),
    (INTERRUPTED, signal.SIGTERM, '', files(), ''),
    (-signal.SIGTERM, signal.SIGTERM, '', files(), ''),
    (-signal.SIGINT, signal.SIGTERM, '', files(), 'exit code -2 after SIGTERM: no output'),
    (INTERRUPTED, signal.SIGTERM, 'x: starting\n', EMPTY, ''),
    (INTERRUPTED, signal.SIGTERM, 'going on from update 2 (9 steps)\n', files(), 'exit code 130'),
    (1, signal.SIGTERM, 'x: starting\nKeyError: 3\n', files(), 'after SIGTERM: KeyError: 3')])
def test_exit_codes_after_a_signal(code, number, output, left, message):
  problem = kill_resume.problem_of_code(code, number, output, left)
  assert message in problem and bool(message) == bool(problem)


def test_phases_of_a_stop():
  started = 'x: starting\n'
  two = receipt_lines(1, 2)
  def phase(output, has_update, *args):
    return kill_resume.phase_of_stop(output, EMPTY, files(*args), has_update)

  whole = two, metrics_lines(1, 2), []
  assert phase('', False, *whole) == 'starting'
  assert phase(started, False, *whole) == 'preparing'
  assert phase(started, True, *whole) == 'training'
  assert phase(started, True, *whole, ['2.orbax-checkpoint-tmp']) == 'writing'
  assert phase(started, True, two, metrics_lines(1, 2, 3), [2]) == 'writing'
  assert phase(started, True, [*two, '{"upd'], metrics_lines(1, 2), [2]) == 'writing'


def test_a_checkpoint_is_complete_with_a_name_and_a_manifest(tmp_path):
  workdir = kill_resume.Workdir(tmp_path)
  assert workdir.whole_checkpoints() == [] and workdir.files().newest == 0
  for name in ('8', '16', '24.orbax-checkpoint-tmp-1', '24'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  for name in ('8', '16'):
    (tmp_path / 'checkpoints' / name / 'manifest.json').write_text('{}')
  assert workdir.whole_checkpoints() == [8, 16] and workdir.files().newest == 16
  assert workdir.files().drafts == {'24.orbax-checkpoint-tmp-1', '24'}


def test_writes_are_counted(tmp_path):
  watch = kill_resume.Watch(tmp_path)
  (tmp_path / 'checkpoints' / '8.orbax-checkpoint-tmp').mkdir(parents=True)
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  watch.look()
  watch.look()
  assert watch.counts == dict(draft=1, checkpoint=0, line=1)
  (tmp_path / 'checkpoints' / '8.orbax-checkpoint-tmp').rename(tmp_path / 'checkpoints' / '8')
  (tmp_path / 'metrics.jsonl').write_text('')  # a process that resumes cuts the file
  watch.look()
  assert watch.counts == dict(draft=1, checkpoint=1, line=1)


def test_stops_are_repeatable_and_cover_the_whole_run():
  def draw(seed):
    rng = random.Random(seed)
    return [kill_resume.draw_stop(rng, number, 2, 4.0, 12.0) for number in range(200)]

  stops = draw(1)
  assert stops == draw(1) != draw(2)
  times = [stop.delay_s for stop in stops if stop.event == 'time']
  assert len(times) == 100 and min(times) < 1 and 7 < max(times) <= 8
  assert {stop.event for stop in stops} == {'time', *kill_resume.EVENTS}
  assert {stop.signal for stop in stops} == set(kill_resume.SIGNALS)
  assert {stop.process for stop in stops} == {0, 1}
  assert kill_resume.draw_stop(random.Random(1), 0, 0, 4.0, 12.0).process is None


def test_every_scheme_has_a_valid_experiment_in_all_places():
  experiments = {}
  for name, row in kill_resume.rows(64).items():
    in_places = [kill_resume.resolved(row, place) for place in row.places]
    experiments[name] = in_places[0]
    ways = {(each.deterministic, each.batch_rows, each.total_steps) for each in in_places}
    assert len(ways) == 1, name
  schemes = {name: SCHEMES[each.scheme_name] for name, each in experiments.items()}
  assert {each.scheme_name for each in experiments.values()} == SCHEMES.keys()
  assert {name for name, each in experiments.items() if not each.deterministic} == {
      name for name, scheme in schemes.items() if not scheme.deterministic} == {
          'impala', 'rapid_async', 'dppo_async', 'apex'}


@pytest.mark.full
def test_a_real_run_is_stopped_and_goes_on():
  process = run_benchmark('kill_resume', '--rows=sync', '--kills=2', '--updates=24',
                          '--compile_soon')
  assert process.returncode == 0, process.stdout + process.stderr
  assert '2 stops, 1 of 1 rows passed' in process.stdout
  assert 'identical; ' in process.stdout


def test_an_unknown_row_is_refused(capsys):
  assert kill_resume.main(['--rows=sink']) == 2
  assert 'unknown row sink; known are sync, cleanba' in capsys.readouterr().err
