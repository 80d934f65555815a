"""Reports of workdirs: whole, unfinished, failed, identical, unequally long, or a stranger's."""

import csv
import json
import math
import pathlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podracer_jit.api import load_config
from podracer_jit.cli.main import main
from podracer_jit.report import comparing, findings, page, reading
from podracer_jit.workdir import record

OLD = pathlib.Path(__file__).resolve().parents[1] / 'workdirs'


def make(folder, *, task='CartPole-v1', seed=1, updates=40, total=40_000, rate=0.001,
         algorithm='ppo', returns=lambda share: 500 * share, metrics=None,
         batch='b'):
  """Writes the files of a run that reports read, in the form that a training gives them."""
  folder.mkdir(parents=True)
  config = {'env': {'task': task}, 'loss': {'name': algorithm}, 'seed': seed, 'total_steps': total,
            'optimizer': {'learning_rate': rate, 'kl_target': 0.0}, 'placement': {'auto': True}}
  start = {'first_update': 1, 'host': 'here', 'commit': 'c0ffee',
           'command': ['podracer_jit', '--config=ppo_cartpole', f'--workdir={folder}'],
           'hardware': {'processor': 'EPYC', 'threads': 16, 'memory': 128_000_000_000,
                        'accelerators': ['H100', 'H100']}}
  (folder / 'config.json').write_text(json.dumps(
      {'config': config, 'versions': {'podracer_jit': '0.9.0'}, 'starts': [start]}))
  with (folder / 'metrics.jsonl').open('w') as file:
    for update in range(1, updates + 1):
      line = dict(update=update, steps=1000 * update, frames=4000 * update, sps=1000.0,
                  elapsed_s=1.0 * update, wall_s=2.0 * update, episodes=5 * update,
                  episode_return=returns(update / updates), cgd=7.5, gud=0.0, actor_wait_s=0.0,
                  learner_wait_s=0.0, memory_mb=400.0 + update, grad_norm=1.0, entropy=0.5,
                  approx_kl=0.01, value_loss=2.0)
      line |= {name: f(update / updates) for name, f in (metrics or {}).items()}
      file.write(json.dumps(line) + '\n')
  with (folder / 'receipts.jsonl').open('w') as file:
    file.write(json.dumps({'segment': 0, 'first_update': 1, 'versions': {}, 'canary': 'abc',
                           'placement': {'actor_devices': [0]}}) + '\n')
    for update in range(1, updates + 1):
      file.write(json.dumps({'update': update, 'batch': f'{batch}{update}',
                             'params': f'{seed}{update}'}) + '\n')
  return folder


def change_config(folder, change):
  """Writes config.json anew with what `change` does to its content."""
  content = json.loads((folder / 'config.json').read_text())
  change(content)
  (folder / 'config.json').write_text(json.dumps(content))


def add_evaluation(folder, mean, update=40, name='evaluate.jsonl', **fields):
  statistics = {'mean': mean, 'standard_error': 1.0}
  record = {'update': update, 'steps': 1000 * update, 'num_episodes': 20} | fields
  record |= {'statistics': statistics} if name == 'evaluate.jsonl' else statistics
  with (folder / name).open('a') as file:
    file.write(json.dumps(record) + '\n')


def report(folders, out):
  assert main(['podracer_jit', 'report', *map(str, folders), f'--out={out}']) == 0
  return (out / page.INDEX).read_text()


def table(path):
  return [*csv.DictReader(path.open())]


@pytest.mark.quick
def test_a_report_of_two_groups_and_two_tasks(tmp_path):
  for seed in (1, 2, 3):
    for rate, factor in ((0.001, 1.0), (0.01, 0.5)):
      for task, top in (('Pong-v5', 14.6), ('Breakout-v5', 30.5)):
        make(tmp_path / 'runs' / f'{task}{rate}{seed}', task=task, seed=seed, rate=rate,
             batch=f'{task}{rate}', returns=lambda share, f=factor, top=top, s=seed:
             share * f * top + 0.01 * s)
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  # Everything is in the file.
  assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)|@import', html)
  assert 'ppo, learning_rate 0.001' in html and 'human-normalised' in html
  assert 'Cleanba PPO' in html and '18.07' in html  # published for Pong
  assert 'EPYC, 16 hardware threads, 128 GB of memory, 2 H100' in html
  assert '440 MB' in html  # the most of all updates
  assert html.count('<svg') >= 2 * 3 + 4 * 3 + 4 + 2
  ids = re.findall(r'\bid="([^"]+)"', html)
  assert len(set(ids)) == len(ids)
  scores = {row['statistic']: row for row in table(tmp_path / 'out' / 'aggregates.csv')
            if row['group'].endswith('0.001')}
  # Both games end at the human's score and two hundredths: (1 + 0.02 / 35.3 + 1 + 0.02 / 28.8) / 2.
  assert float(scores['Mean']['value']) == pytest.approx(1 + 0.01 / 35.3 + 0.01 / 28.8)
  assert float(scores['Mean']['low']) < float(scores['Mean']['high'])
  pictures = {path.name for path in (tmp_path / 'out' / page.FIGURES).glob('*.svg')}
  assert {'curve-Pong-v5-steps.svg', 'curve-Pong-v5-frames.svg', 'curve-Pong-v5-wall.svg',
          'aggregate-IQM-steps.svg', 'performance-profiles.svg'} <= pictures


def test_a_page_of_one_run_explains_its_metrics(tmp_path):
  metrics = {'entropy': lambda share: 0.5 * max(0, 0.8 - share),
             'value_loss': lambda share: 10.0 ** (6 * share), 'my_term': lambda share: share}
  html = report([make(tmp_path / 'run', metrics=metrics)], tmp_path / 'out')
  assert 'Share of the variance' not in html  # this run has no explained_variance
  assert 'Entropy of the policy' in html and 'Unusual in this run' in html
  assert 'entropy is at 0' in html and 'value_loss explodes' in html
  assert 'A term of the algorithm&#39;s own.' in html
  assert '--workdir=' in html and 'c0ffee' in html


@pytest.mark.parametrize('metrics, total, words', [
    ({'approx_kl': lambda share: 0.2}, 40_000, 'approx_kl is large'),
    ({'episodes': lambda share: 9}, 40_000, '9 episodes have ended'),
    ({'grad_norm': lambda share: math.nan if share > 0.9 else 1.0}, 40_000,
     'grad_norm is not a finite number'),
    ({'learner_wait_s': lambda share: 0.8}, 40_000, 'the actors are the bottleneck'),
    ({'explained_variance': lambda share: -1.0}, 40_000, 'no better than a constant'),
    ({'clip_fraction': lambda share: 0.6}, 40_000, 'clip_fraction is 0.60'),
])
def test_what_is_unusual_is_said(tmp_path, metrics, total, words):
  (run,) = reading.read([make(tmp_path / 'run', metrics=metrics, total=total)])
  assert any(words in line for line in findings.findings(run))


def test_a_usual_run_has_no_findings(tmp_path):
  (run,) = reading.read([make(tmp_path / 'run')])
  assert findings.findings(run) == []


def test_unfinished_failed_single_and_unequal_runs_are_taken_and_said(tmp_path):
  sweep = tmp_path / 'sweep'
  make(sweep / 'seed=1', seed=1)
  make(sweep / 'seed=2', seed=2, updates=10)  # too short to be compared
  make(sweep / 'seed=3', seed=3, updates=30)
  make(sweep / 'seed=4', seed=4, updates=35,
       returns=lambda share: math.nan if share > 0.5 else 1.0)
  command = ['podracer_jit', 'sweep', '--config=x', '--grid=network.hidden=(64,),(32,)']
  (sweep / 'sweep.json').write_text(json.dumps({'commands': [command], 'members': [
      {'name': 'seed=2', 'error': 'EnvironmentFailed: out <of> order', 'fields': {'seed': 2}},
      {'name': 'seed=5', 'error': None, 'command': ['podracer_jit', '--config=x'],
       'fields': {'seed': 5, 'env.task': 'CartPole-v1'}}]}))
  runs = reading.read([sweep])
  assert {run.name: run.state for run in runs} == {
      'seed=1': 'finished', 'seed=2': 'failed', 'seed=3': 'stopped', 'seed=4': 'stopped',
      'seed=5': 'not begun'}
  comparison = comparing.compare(runs)
  assert comparison.scales['CartPole-v1'].steps == 30_000  # where the shortest compared run ends
  assert comparison.compared == {'seed=1', 'seed=3'}
  html = report([sweep], tmp_path / 'out')
  assert 'out &lt;of&gt; order' in html and '<of>' not in html
  for words in ('1 run has failed', '1 run has not begun', 'compared at equal steps',
                'its return is not finite', 'podracer_jit --config=x',
                'podracer_jit sweep --config=x &#39;--grid=network.hidden=(64,),(32,)&#39;'):
    assert words in html, words


def test_what_was_not_run_is_marked_and_workdirs_are_named(tmp_path):
  make(tmp_path / 'runs' / 'a1', task='Catch-v0')
  make(tmp_path / 'runs' / 'a2', task='Acrobot-v1')
  make(tmp_path / 'runs' / 'b1', task='Catch-v0', rate=0.01)
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  row = re.search(r'<tr>\s*<th scope="row">Acrobot-v1</th>(?:(?!</tr>).)*0\.01.*?</tr>', html, re.S)
  assert 'not run' in row[0]
  assert html.count('not run') == 1
  assert 'No published figures of Acrobot-v1, Catch-v0 are known' in html
  assert all(str(tmp_path / 'runs' / name) in html for name in ('a1', 'a2', 'b1'))


def test_what_decides_only_roundings_makes_no_group(tmp_path):
  for seed, rows in ((1, 64), (2, 0)):
    folder = make(tmp_path / 'runs' / f's{seed}', seed=seed)
    change_config(folder, lambda content, rows=rows: content['config'].update(microbatch_rows=rows))
  (group,) = comparing.grouped(reading.read([tmp_path / 'runs']))
  assert [run.seed for run in group.runs] == [1, 2]


def test_runs_of_an_earlier_version_are_of_the_group_of_todays(tmp_path):
  """They lack the options that were added since."""
  fields = load_config('ppo_cartpole:smoke').to_dict()
  for seed, version in ((1, '0.8.0'), (2, '0.9.0')):
    folder = make(tmp_path / 'runs' / f's{seed}', seed=seed)
    loss = dict(fields['loss'])
    if version == '0.8.0':
      del loss['clip_smoothly']
    change_config(folder, lambda content, loss=loss, version=version, seed=seed: content.update(
        config=record.json_of(fields | {'loss': loss, 'seed': seed}),
        versions={'podracer_jit': version}))
  (group,) = comparing.grouped(reading.read([tmp_path / 'runs']))
  assert [run.seed for run in group.runs] == [1, 2]


def test_placements_are_one_group_but_a_learner_that_sleeps(tmp_path):
  for seed, field, value in ((1, 'auto', True), (2, 'auto', False), (3, 'learner_delay_s', 0.5)):
    change_config(make(tmp_path / 'runs' / f'{seed}', seed=seed), lambda content, f=field, v=value:
                  content['config']['placement'].update({'learner_delay_s': 0.0, f: v}))
  groups = comparing.grouped(reading.read([tmp_path / 'runs']))
  assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [
      ('ppo, learner_delay_s 0.0', [1, 2]), ('ppo, learner_delay_s 0.5', [3])]


def test_groups_of_two_networks_are_named_by_them(tmp_path):
  for name, other in (('mlp', {'activation': 'tanh'}), ('simba', {'blocks': 2})):
    folder = make(tmp_path / 'runs' / name)
    change_config(folder, lambda content, name=name, other=other: content['config'].update(
        network={'name': name} | other))
  groups = comparing.grouped(reading.read([tmp_path / 'runs']))
  assert [group.name for group in groups] == ["ppo, network 'mlp'", "ppo, network 'simba'"]


def test_a_folder_that_is_given_in_several_ways_counts_once(tmp_path, monkeypatch):
  make(tmp_path / 'a' / 'run1')
  make(tmp_path / 'a' / 'run2', seed=2)
  (tmp_path / 'link').symlink_to(tmp_path / 'a')
  (tmp_path / 'a' / 'sweep.json').write_text(json.dumps({'members': [
      {'name': name, 'error': None, 'fields': {}} for name in ('run1', 'run2', 'run3')]}))
  monkeypatch.chdir(tmp_path)
  runs = reading.read([Path('a'), tmp_path / 'a', Path('link'), Path('a/run1')])
  assert [run.name for run in runs] == ['run1', 'run2', 'run3']
  assert reading.read([Path('a/run1'), tmp_path / 'a/run1'])[0].path == Path('a/run1')
  assert reading.read([]) == []


def test_long_names_that_differ_where_they_are_cut_stay_different(tmp_path):
  for end in ('1', '2'):
    make(tmp_path / 'runs' / f'{70 * "x"}{end}{70 * "y"}', seed=int(end), batch=end)
  runs = reading.read([tmp_path / 'runs'])
  assert len({run.name for run in runs}) == 2
  assert len(comparing.compare(runs).compared) == 2


def test_a_member_that_was_finished_by_hand_has_finished(tmp_path):
  make(tmp_path / 'seed=1')
  (tmp_path / 'sweep.json').write_text(json.dumps({'members': [
      {'name': 'seed=1', 'error': 'EnvironmentFailed', 'fields': {'seed': 1}}]}))
  assert reading.read([tmp_path])[0].state == 'finished'


def test_final_evaluations_are_the_newest_on_the_task_as_it_was_trained(tmp_path):
  folder = make(tmp_path / 'run')
  add_evaluation(folder, 100.0, update=30)
  add_evaluation(folder, 55.0, env={'max_episode_steps': 50})
  add_evaluation(folder, 11.0, epsilon=1.0)
  report([folder], tmp_path / 'out')
  (row,) = table(tmp_path / 'out' / 'final.csv')
  assert (float(row['mean']), row['source']) == (100.0, 'podracer_jit evaluate')
  add_evaluation(folder, 300.0, update=35, name='evaluations.jsonl')
  report([folder], tmp_path / 'out')
  (row,) = table(tmp_path / 'out' / 'final.csv')
  assert (float(row['mean']), row['source']) == (300.0, 'evaluation while training')


def test_final_evaluations_leave_out_what_is_not_compared(tmp_path):
  for seed, updates in ((1, 40), (2, 40), (3, 10)):
    folder = make(tmp_path / 'runs' / f's{seed}', seed=seed, updates=updates, batch=f'{seed}')
    add_evaluation(folder, 10.0 * seed, update=updates)
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  (row,) = table(tmp_path / 'out' / 'final.csv')
  assert (row['seeds'], float(row['mean'])) == ('2', 15.0)
  assert 'Not compared: s3' in html


def test_seeds_of_one_program_share_its_time(tmp_path):
  for seed in (1, 2, 3):
    folder = make(tmp_path / 'runs' / f'seed{seed}', seed=seed, updates=500, total=500_000,
                  batch=f'{seed}')
    path = folder / 'receipts.jsonl'
    header, rest = path.read_text().split('\n', 1)
    path.write_text(json.dumps(json.loads(header) | {'num_seeds': 3}) + '\n' + rest)
  make(tmp_path / 'runs' / 'alone', seed=4, updates=500, total=500_000, batch='4')
  facts = page._facts(comparing.compare([]), reading.read([tmp_path / 'runs']))  # noqa: SLF001
  assert ('Time in all', '33 min') in facts  # twice 500 updates of 2 s


def test_waits_for_evaluations_are_the_sum_of_all_lines(tmp_path):
  """The report reads each third of 2,001 lines, and each hundredth line has a wait."""
  def wait(share):
    return 5.0 if round(2001 * share) % 100 == 0 else 0.0
  (run,) = reading.read([make(tmp_path / 'run', updates=2001, total=2_001_000,
                              metrics={'eval_wait_s': wait})])
  assert findings.wait_shares(run)['eval'] == pytest.approx(20 * 5 / 2001)


def test_a_run_that_does_not_learn_yet_has_no_findings(tmp_path):
  zero = dict.fromkeys(('sampled', 'entropy', 'grad_norm'), lambda share: 0.0)
  (run,) = reading.read([make(tmp_path / 'run', metrics=zero, updates=20)])
  assert findings.findings(run) == []


def test_files_of_an_earlier_report_go_and_those_of_the_user_stay(tmp_path):
  for k in range(2):
    make(tmp_path / 'runs' / f'{k}', task=f'task{k}', batch=f'{k}')
  out = tmp_path / 'out'
  report([tmp_path / 'runs'], out)
  mine = [out / 'mine.csv', out / page.FIGURES / 'mine.svg']
  for path in mine:
    path.write_text('mine')
  report([tmp_path / 'runs' / '0'], out)
  left = {path.stem for path in (out / page.FIGURES).glob('curve-*')}
  assert left == {f'curve-task0-{axis}' for axis in ('steps', 'frames', 'wall')}
  assert not (out / 'aggregates.csv').exists()
  assert all(path.read_text() == 'mine' for path in mine)


@pytest.mark.filterwarnings('error')
def test_names_in_any_script_are_drawn_without_warnings(tmp_path):
  make(tmp_path / 'runs' / 'a', algorithm='\u5f3a\u5316')
  make(tmp_path / 'runs' / 'b', seed=2, batch='c')
  assert '\u5f3a\u5316' in report([tmp_path / 'runs'], tmp_path / 'out')


@pytest.mark.quick
@pytest.mark.parametrize('out, words', [
    ('', 'podracer_jit report: --out is needed: podracer_jit report runs/ppo runs/sweep '
     '--out=report\n'),
    ('file', 'podracer_jit report: --out: file is a file; name a folder\n'),
    ('run', 'podracer_jit report: --out: run is a workdir; choose another folder\n')])
def test_a_folder_that_cannot_be_written_is_refused(out, words, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  make(tmp_path / 'run')
  (tmp_path / 'file').write_text('mine')
  assert main(['podracer_jit', 'report', 'run', f'--out={out}']) == 2
  assert capsys.readouterr().err == words
  assert (tmp_path / 'file').read_text() == 'mine'


def test_identical_runs_are_named_and_count_once(tmp_path):
  make(tmp_path / 'runs' / 'a', seed=1)
  make(tmp_path / 'runs' / 'b', seed=1, updates=20, total=40_000)
  make(tmp_path / 'runs' / 'c', seed=2)
  runs = reading.read([tmp_path / 'runs'])
  assert comparing.identical(runs) == [(['a', 'b'], 20, False)]
  assert comparing.compare(runs).compared == {'a', 'c'}
  assert 'a, b are identical to the last bit' in report([tmp_path / 'runs'], tmp_path / 'out')


def test_names_and_values_of_a_stranger_are_escaped(tmp_path):
  folder = make(tmp_path / 'runs' / '<script>alert(1)</script>'.replace('/', '_'),
                task='"><img src=x onerror=alert(1)>$x$')
  make(tmp_path / 'runs' / 'other', algorithm='</title><b>', task='T')
  assert folder.exists()
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  for bad in ('<script>', '<img src=x', '</title><b>'):
    assert bad not in html
  for picture in (tmp_path / 'out' / page.FIGURES).glob('*.svg'):
    assert '<img' not in picture.read_text() and '<b>' not in picture.read_text()


def test_damaged_files_are_read_as_far_as_they_go(tmp_path):
  folder = make(tmp_path / 'runs' / 'a')
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write('{"update": 41, "ste')
  (folder / 'config.json').write_text('{')
  make(tmp_path / 'runs' / 'b', updates=0)
  (tmp_path / 'runs' / 'b' / 'receipts.jsonl').unlink()
  a, b = reading.read([tmp_path / 'runs'])
  assert a.steps == 40_000 and a.notes == ['config.json is missing or garbled']
  assert b.state == 'not begun' and len(b.notes) == 2
  assert 'config.json is missing or garbled' in report([tmp_path / 'runs'], tmp_path / 'out')


def test_a_sweep_that_has_not_begun_and_a_garbled_run_have_a_page(tmp_path):
  waiting = tmp_path / 'waiting'
  waiting.mkdir()
  for count, words in ((1, '1 run; none has an update yet'), (2, '2 runs; none has an')):
    (waiting / 'sweep.json').write_text(json.dumps({'commands': [], 'members': [
        {'name': f'seed={seed}', 'error': None, 'command': ['podracer_jit', '--config=x'],
         'fields': {'seed': seed, 'env.task': 'CartPole-v1'}} for seed in range(count)]}))
    assert words in report([waiting], tmp_path / 'out')
  garbled = tmp_path / 'garbled'
  garbled.mkdir()
  (garbled / 'config.json').write_text('{}')
  assert 'none has an update yet' in report([garbled], tmp_path / 'out')
  empty = tmp_path / 'empty'
  empty.mkdir()
  for paths in ([waiting, empty], [empty, waiting]):
    with pytest.raises(ValueError, match='empty: there is no run in it'):
      reading.read(paths)


@pytest.mark.parametrize('version', ['v0_6_0', 'v0_7_0'])
def test_workdirs_of_earlier_versions_are_read(version, tmp_path):
  runs = reading.read([OLD / version])
  assert runs and all(run.steps and run.task != 'unknown task' for run in runs)
  report([OLD / version], tmp_path / 'out')


def test_a_report_starts_without_jax(tmp_path):
  make(tmp_path / 'run')
  code = ("import sys; from podracer_jit.cli.main import main\n"
          f"assert main(['podracer_jit', 'report', {str(tmp_path / 'run')!r}, "
          f"'--out={tmp_path / 'out'}']) == 0\nprint('jax' in sys.modules)")
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=300)
  assert done.stdout.splitlines()[-1:] == ['False'], done.stderr


def test_without_the_extra_a_line_says_what_to_install(tmp_path, monkeypatch, capsys):
  make(tmp_path / 'run')
  monkeypatch.setitem(sys.modules, 'podracer_jit.report.page', None)
  monkeypatch.delitem(sys.modules, 'podracer_jit.report.page')
  monkeypatch.setitem(sys.modules, 'jinja2', None)  # its import fails
  assert main(['podracer_jit', 'report', str(tmp_path / 'run'), f'--out={tmp_path / "out"}']) == 2
  assert 'extra report' in capsys.readouterr().err


@pytest.mark.parametrize('args, words', [
    ([], 'a folder is needed'), (['nowhere'], 'does not exist'), (['.'], 'there is no run'),
    (['run', '--out=run'], 'is a workdir')])
def test_wrong_arguments_are_refused(args, words, tmp_path, monkeypatch, capsys):
  make(tmp_path / 'folder' / 'run')
  monkeypatch.chdir(tmp_path / ('folder' if 'run' in args else '.'))
  if args == ['.']:
    monkeypatch.chdir(tmp_path / 'folder' / 'run')
    (tmp_path / 'empty').mkdir()
    args = [str(tmp_path / 'empty')]
  assert main(['podracer_jit', 'report', *args]) == 2
  assert words in capsys.readouterr().err


def test_the_legend_of_a_curve_has_the_groups_of_its_task(tmp_path):
  for k, rate in enumerate((0.25, 0.5, 0.75)):
    make(tmp_path / 'runs' / f'{k}', task=f'task{min(k, 1)}', batch=f'{k}', rate=rate)
  report([tmp_path / 'runs'], tmp_path / 'out')
  def legend(task):
    svg = (tmp_path / 'out' / page.FIGURES / f'curve-{task}-steps.svg').read_text()
    return re.findall(r'learning_rate (0\.\d+)', svg)
  assert legend('task1') == ['0.5', '0.75']
  assert legend('task0') == []  # a single group needs none


def test_a_page_that_would_be_too_large_leaves_figures_to_files(tmp_path, monkeypatch):
  for k in range(3):
    make(tmp_path / 'runs' / f'{k}', task=f'task{k}', batch=f'{k}')
  monkeypatch.setattr(page, 'MOST_BYTES', 170_000)
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  assert len(html.encode()) <= 170_000
  assert 'too large' in html
  assert set(re.findall(r'id="axis-(\w+)"', html)) == {'steps'}  # no switch without a figure
  assert (tmp_path / 'out' / page.FIGURES / 'curve-task2-wall.svg').exists()


def test_the_film_of_the_best_run_is_on_the_page(tmp_path):
  best = make(tmp_path / 'runs' / 'best', seed=1)
  make(tmp_path / 'runs' / 'other', seed=2, returns=lambda share: share)
  assert '--video=mp4' in report([tmp_path / 'runs'], tmp_path / 'out')  # how to make one
  frames = [Image.new('RGB', (40, 30), (8 * k, 0, 0)) for k in range(12)]
  (best / 'videos').mkdir()
  frames[0].save(best / 'videos' / '40.gif', save_all=True, append_images=frames[1:])
  evaluation = dict(update=40, steps=40_000, mean=500.0, video='videos/40.gif')
  (best / 'evaluations.jsonl').write_text(json.dumps(evaluation) + '\n')
  html = report([tmp_path / 'runs'], tmp_path / 'out')
  assert 'data:image/jpeg;base64,' in html and 'data:image/gif;base64,' in html
  # A film outside of the workdir is a stranger's attempt to show a file of the reader's.
  frames[0].save(tmp_path / 'private.gif')
  (best / 'evaluations.jsonl').write_text(json.dumps(
      evaluation | {'video': '../../private.gif'}) + '\n')
  assert '--video=mp4' in report([tmp_path / 'runs'], tmp_path / 'out')


def test_long_metrics_are_sampled_with_their_last_line(tmp_path):
  (run,) = reading.read([make(tmp_path / 'run', updates=2501, total=2_501_000)])
  assert len(run.column('steps')) <= 1000
  assert run.steps == 2_501_000 and np.isfinite(run.column('episode_return')).all()
