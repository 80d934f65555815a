"""Searches by Optuna, with evaluations that are written by hand."""

import json
from pathlib import Path

import pytest

from podracer_jit.sweep import search
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.members import member_of
from podracer_jit.sweep.search import Range

RATE = 'optimizer.learning_rate'


@pytest.mark.parametrize('text, expected', [
    ('log(1e-4,1e-2)', Range('log', 1e-4, 1e-2)),
    ('uniform(0, 1)', Range('uniform', 0.0, 1.0)),
    ('int(1,8)', Range('int', 1, 8)),
    ('linear:1:0', None), ('own(x,y)', None), ((1, 2), None), (0.1, None)])
def test_ranges(text, expected):
  assert search.range_of(text) == expected


@pytest.mark.parametrize('text', ['log(0,1)', 'uniform(2,1)', 'int(1.5,2)', 'log(1)', 'int(1,1)'])
def test_ranges_that_are_none(text):
  with pytest.raises(ValueError, match='^--grid: .* must have two numbers, the lower one first'):
    search.range_of(text)


@pytest.mark.parametrize('text, words', [
    ('int(1,1e3)', 'must have two numbers, the lower one first, both whole'),
    ('uniform(0,inf)', 'must have two numbers, the lower one first, both finite'),
    ('log(1,inf)', 'must have two numbers, the lower one first, both finite and above 0'),
    ('loguniform(1e-4,1e-2)',
     'is no range; ranges are log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH)'),
    ('logint(1,8)', 'is no range; ranges are log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH)')])
def test_what_is_wrong_with_a_range_is_said(text, words):
  with pytest.raises(ValueError) as error:
    search.range_of(text)
  assert str(error.value) == f'--grid: {text} {words}'


def test_very_many_trials_are_refused():
  assert search.settings_of('tpe:100000', None, 1).trials == 100_000
  for number in ('100001', '99999999999', '9' * 5000):
    with pytest.raises(ValueError, match='^--search: must be at most 100,000 trials, got '):
      search.settings_of(f'tpe:{number}', None, 1)


def test_examples_have_each_value_and_both_ends():
  ranges = search.ranges_of([(RATE, ['log(1e-4,1e-2)']), ('loss.clip', [0.1, 0.2, 0.3])])
  assert search.examples(ranges) == [
      {RATE: 1e-4, 'loss.clip': 0.1}, {RATE: 1e-2, 'loss.clip': 0.1},
      {RATE: 1e-4, 'loss.clip': 0.2}, {RATE: 1e-4, 'loss.clip': 0.3}]
  with pytest.raises(ValueError, match='^--grid: loss.clip must have one range, or a list'):
    search.ranges_of([('loss.clip', ['uniform(0,1)', 0.2])])


def make(out, sampler='random', trials=8, pruner=None, own=3e-4, seeds=(1,),
         ranges=(('log(1e-4,1e-2)'),), name=RATE, retry=False):
  folder = Folder(out, '1')
  if retry:
    folder.retry(folder.members)
  settings = search.settings_of(f'{sampler}:{trials}', pruner, 1, retry)
  return search.Search(folder, settings, search.ranges_of([(name, list(ranges))]),
                       lambda fields: [member_of('x', {**fields, 'seed': seed}) for seed in seeds],
                       {name: own})


def evaluate(plan, member, *means):
  folder = plan._folder.path / member.name
  folder.mkdir(exist_ok=True)
  with (folder / search.EVALUATIONS).open('a') as file:
    file.writelines(json.dumps({'mean': float(mean), 'steps': 1}) + '\n' for mean in means)


def finish(plan, member, mean):
  evaluate(plan, member, mean)
  plan.ended(member, is_finished=True)


def fail(plan, member):
  plan._folder.failed(member, 'no')
  plan.ended(member, is_finished=False)


def states(plan):
  return [trial.state.name for trial in plan._study.trials]


def test_the_best_of_all_trials_and_the_own_values(tmp_path):
  plan = make(tmp_path)
  rates = []
  while member := plan.next():
    rate = member.fields[RATE]
    rates.append(rate)
    finish(plan, member, -abs(rate - 2e-3))
  assert plan.is_done() and len(rates) == 8
  assert rates[0] == 3e-4  # the config's own
  assert all(1e-4 <= rate <= 1e-2 and rate == float(f'{rate:.3g}') for rate in rates)
  best, own = plan.best()
  assert best.fields[RATE] == min(rates, key=lambda rate: abs(rate - 2e-3)) and not best.is_own
  assert own.value == -abs(3e-4 - 2e-3) and own.is_own


def test_a_search_that_was_stopped_goes_on(tmp_path):
  plan = make(tmp_path, trials=3)
  finish(plan, plan.next(), 1)
  stopped = plan.next()
  plan.ended(stopped, is_finished=False)
  plan = make(tmp_path, trials=3)
  assert plan.next() == stopped
  finish(plan, stopped, 2)
  last = plan.next()
  assert last.fields[RATE] not in (3e-4, stopped.fields[RATE])  # not the same numbers again
  finish(plan, last, 0)
  assert plan.is_done() and plan.next() is None
  best, own = plan.best()
  assert best.fields == {RATE: stopped.fields[RATE]} and own.value == 1


def test_what_a_killed_sweep_and_a_full_disk_left_does_not_stop_a_search(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  out = Path('.')
  plan = make(out, trials=2)
  finish(plan, plan.next(), 1)
  storage = tmp_path / 'optuna.log'
  whole = storage.read_bytes()
  storage.write_bytes(whole + b'{"op_code": 4, "wor')
  # Optuna's lock is a link to the path as it was given, which leads nowhere from another folder.
  (tmp_path / 'optuna.log.lock').symlink_to('elsewhere/optuna.log')
  plan = make(out, trials=2)
  assert storage.read_bytes().startswith(whole)
  finish(plan, plan.next(), 2)
  assert plan.is_done() and make(out, trials=2).best()[0].value == 2


def test_a_trial_of_several_seeds_is_their_mean_and_fails_with_one(tmp_path):
  plan = make(tmp_path, trials=2, seeds=(1, 2))
  one, two = plan.next(), plan.next()
  assert one.fields == {**two.fields, 'seed': 1}
  finish(plan, one, 1)
  assert plan.best() == (None, None)
  finish(plan, two, 4)
  assert plan.best()[0].value == 2.5
  third = plan.next()
  plan._folder.failed(third, 'no')
  plan.ended(third, is_finished=False)
  assert plan.is_done() and plan.best()[0].value == 2.5


def test_values_that_were_tried_are_not_tried_again(tmp_path):
  plan = make(tmp_path, trials=20, ranges=(1e-3, 3e-4))
  members = []
  while member := plan.next():
    members.append(member)
    finish(plan, member, 1)
  assert sorted(member.fields[RATE] for member in members) == [3e-4, 1e-3] and plan.is_done()


def test_asha_gives_up_what_is_behind(tmp_path):
  plan = make(tmp_path, pruner='asha', trials=5)
  members = [plan.next() for _ in range(5)]
  for i, member in enumerate(members[:4]):
    evaluate(plan, member, *[10 - i] * 8)
  given_up = plan.given_up(members)
  assert members[0] not in given_up and members[3] in given_up
  assert members[4] not in given_up  # it has no evaluation yet
  plan.ended(members[3], is_finished=False)
  evaluate(plan, members[0], 10)
  plan.ended(members[0], is_finished=True)
  best, _ = plan.best()
  assert best.value == 10


@pytest.mark.parametrize('ends', [(fail, finish), (finish, fail), (fail, fail)])
def test_a_failed_member_does_not_stop_the_others_of_its_trial(tmp_path, ends):
  plan = make(tmp_path, trials=2, seeds=(1, 2, 3))
  one, two = plan.next(), plan.next()
  for end, member in zip(ends, (one, two), strict=True):
    end(plan, member, *[1] * (end is finish))
  assert states(plan) == ['FAIL']
  other = plan.next()  # the third member would not count
  assert other.fields[RATE] != one.fields[RATE] and other.seeds[0] == 1
  for member in (other, plan.next(), plan.next()):
    finish(plan, member, 2)
  assert states(plan) == ['FAIL', 'COMPLETE'] and plan.is_done() and plan.best()[0].value == 2


@pytest.mark.filterwarnings('error')
def test_tuples_are_values_and_a_search_of_them_goes_on(tmp_path):
  hidden = dict(name='network.hidden', ranges=((256, 256), (64, 64)), own=(64, 64))
  plan = make(tmp_path, trials=8, **hidden)
  finish(plan, plan.next(), 1)
  stopped = plan.next()
  assert stopped.fields['network.hidden'] == (256, 256)
  plan.ended(stopped, is_finished=False)
  plan = make(tmp_path, trials=8, **hidden)
  assert plan.next() == stopped
  finish(plan, stopped, 2)
  assert plan.next() is None
  best, own = plan.best()
  assert best.fields == {'network.hidden': (256, 256)} and own.is_own and own.value == 1


def test_trials_that_have_failed_run_again_only_if_that_is_asked_for(tmp_path):
  plan = make(tmp_path, trials=3, seeds=(1, 2))
  first = plan.next()
  fail(plan, first)
  for _ in range(4):
    finish(plan, plan.next(), 1)
  assert plan.next() is None and states(plan) == ['FAIL', 'COMPLETE', 'COMPLETE']
  plan = make(tmp_path, trials=3, seeds=(1, 2))
  assert plan.is_done()
  for _ in range(2):  # the second command finds the trial of the first one waiting
    plan = make(tmp_path, trials=3, seeds=(1, 2), retry=True)
  assert not plan.is_done() and plan.next() == first
  finish(plan, first, 5)
  finish(plan, plan.next(), 7)
  assert plan.is_done() and plan.next() is None and plan.best()[0].value == 6
  assert states(plan) == ['FAIL', 'COMPLETE', 'COMPLETE', 'COMPLETE']
  assert make(tmp_path, trials=3, seeds=(1, 2), retry=True).is_done()


def test_values_that_were_pruned_are_not_tried_again(tmp_path):
  plan = make(tmp_path, pruner='asha', trials=6, ranges=(1e-3, 3e-4))
  good, bad = plan.next(), plan.next()
  evaluate(plan, good, *[10] * 4)
  evaluate(plan, bad, *[1] * 4)
  assert plan.given_up([good, bad]) == [bad]
  plan.ended(bad, is_finished=False)
  finish(plan, good, 10)
  assert plan.next() is None
  assert {trial.state.name for trial in plan._study.trials if trial.params == {RATE: '0.001'}
          } == {'PRUNED'}


@pytest.mark.parametrize('before, now, words', [
    (['log(1e-4,1e-2)'], ['log(1e-4,1e-1)'], 'log(0.0001,0.01) when the search began, and is '
     'log(0.0001,0.1) now'),
    (['log(1e-4,1e-2)'], ['uniform(1e-4,1e-2)'], 'log(0.0001,0.01) when the search began, and is '
     'uniform(0.0001,0.01) now'),
    (['int(1,8)'], [1, 8], 'int(1,8) when the search began, and is 1,8 now'),
    ([(8, 8), (4,)], [(8, 8), (16,)], '(4,),(8, 8) when the search began, and is (16,),(8, 8) now'),
])
def test_a_search_that_goes_on_has_the_ranges_with_which_it_began(tmp_path, before, now, words):
  make(tmp_path, ranges=before, own=None).next()
  with pytest.raises(ValueError) as error:
    make(tmp_path, ranges=now, own=None)
  assert str(error.value) == f'--grid: {RATE} was {words}; choose another --out'
  with pytest.raises(ValueError, match='^--grid: .* was .* when the search began, and is not '
                     'searched now'):
    make(tmp_path, name='loss.clip', ranges=before)
  make(tmp_path, ranges=before[::-1], own=None)


def test_a_search_that_goes_on_has_the_seeds_with_which_it_began(tmp_path):
  plan = make(tmp_path, seeds=(1, 2))
  finish(plan, plan.next(), 5)
  with pytest.raises(ValueError, match=(
      r'^--seeds, --tasks: a trial was x,learning_rate=\S+,seed=1, x,learning_rate=\S+,seed=2 when '
      r'the search began, and would be x,learning_rate=\S+,seed=1 now; choose another --out$')):
    make(tmp_path, seeds=(1,))
  make(tmp_path, seeds=(1, 2))


def test_a_garbled_storage_is_named(tmp_path):
  finish(plan := make(tmp_path), plan.next(), 1)
  path = tmp_path / 'optuna.log'
  text = path.read_text()
  for garbled in (f'?{text}', 'null\n', '{}\n', text.replace('op_code', 'code')):
    path.write_text(garbled)
    with pytest.raises(ValueError) as error:
      make(tmp_path)
    assert str(error.value).startswith(f'--out: {path} is garbled (')
    assert 'move it away, and the search begins anew' in str(error.value)
