"""Searches by Optuna, with evaluations that are written by hand."""

import json

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
    ('linear:1:0', None), ((1, 2), None), (0.1, None)])
def test_ranges(text, expected):
  assert search.range_of(text) == expected


@pytest.mark.parametrize('text', ['log(0,1)', 'uniform(2,1)', 'int(1.5,2)', 'log(1)', 'int(1,1)'])
def test_ranges_that_are_none(text):
  with pytest.raises(ValueError, match='^--grid: .* must have two numbers, the lower one first'):
    search.range_of(text)


def test_examples_have_each_value_and_both_ends():
  ranges = search.ranges_of([(RATE, ['log(1e-4,1e-2)']), ('loss.clip', [0.1, 0.2, 0.3])])
  assert search.examples(ranges) == [
      {RATE: 1e-4, 'loss.clip': 0.1}, {RATE: 1e-2, 'loss.clip': 0.1},
      {RATE: 1e-4, 'loss.clip': 0.2}, {RATE: 1e-4, 'loss.clip': 0.3}]
  with pytest.raises(ValueError, match='^--grid: loss.clip must have one range, or values'):
    search.ranges_of([('loss.clip', ['uniform(0,1)', 0.2])])


def make(out, sampler='random', trials=8, pruner=None, own=3e-4, seeds=(1,),
         ranges=(('log(1e-4,1e-2)'),)):
  folder = Folder(out, '1')
  settings = search.settings_of(f'{sampler}:{trials}', pruner, 1)
  return search.Search(folder, settings, search.ranges_of([(RATE, list(ranges))]),
                       lambda fields: [member_of('x', {**fields, 'seed': seed}) for seed in seeds],
                       {RATE: own})


def evaluate(plan, member, *means):
  folder = plan._folder.path / member.name
  folder.mkdir(exist_ok=True)
  with (folder / search.EVALUATIONS).open('a') as file:
    file.writelines(json.dumps({'mean': float(mean), 'steps': 1}) + '\n' for mean in means)


def finish(plan, member, mean):
  evaluate(plan, member, mean)
  plan.ended(member, is_finished=True)


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
