"""The search for placements: it tries possible ones, changes nothing else, and goes on."""

import json
import os
import signal
import statistics
import subprocess
import sys

import pytest
from absl.flags import FlagValues

from benchmarks import processes
from benchmarks.tests.run import run_benchmark
from benchmarks.tune import candidates
from benchmarks.tune.__main__ import Case, row
from benchmarks.tune.search import DEVICES, FINALISTS, PAIR, PAIRS, SHIPPED, THREADS, Search, Speed
from podracer_jit.configs import impala_atari, impala_catch, pong_laptop, ppo_cartpole
from podracer_jit.experiment import flags
from podracer_jit.experiment.resolve import changed as changed_experiment
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime.machine import Machine
from tests.runs import changed

DEVICE_0 = ((0,), (0,))


def _catch(**fields):
  return changed(impala_catch.get_config('smoke').to_dict(), **fields)


def _laptop(**fields):
  return changed(pong_laptop.get_config().to_dict(), **fields)


CASES = {
    'one pool and group': (_catch(), 4, [DEVICE_0, ((1,), (0,))]),
    'one core': (_catch(), 1, [DEVICE_0]),
    'two pools and four groups on four': (_catch(num_shards=2, num_grad_shards=4), 4, [
        DEVICE_0, ((1,), (0,)), ((0, 1), (0,)), ((1, 2), (0,)),
        ((0,), (0, 1)), ((2,), (0, 1)), ((0, 1), (0, 1)), ((2, 3), (0, 1)),
        ((0,), (0, 1, 2, 3)), ((0, 1), (0, 1, 2, 3))]),
    'with lag 0 nothing is apart': (_laptop(), 4, [
        ((0, 1), (0, 1)), DEVICE_0, ((0, 1), (0,)), ((0,), (0, 1)), DEVICE_0]),
    'alone': (ppo_cartpole.get_config().to_dict(), 4, [DEVICE_0, DEVICE_0]),
    'colocated': (_laptop(scheme='ddppo'), 4, [((0, 1), (0, 1)), DEVICE_0]),
    'as many workers': (_laptop(
        scheme='dppo_async', placement__actor_devices=(0, 1), placement__learner_devices=(0, 1)),
        4, [((0, 1), (0, 1)), ((0, 0), (0, 0))]),
    'as many groups': (_laptop(
        exact_reduce=False, placement__learner_devices=(0, 1)), 4, [
            ((0, 1), (0, 1)), ((0,), (0, 1))]),
}


@pytest.mark.parametrize('case', CASES)
def test_candidates_are_all_possible_placements(case):
  config, cores, expected = CASES[case]
  machine = Machine(cores, cores)
  experiment = resolve(config)
  places = candidates.places(experiment, machine)
  assert places[0] == candidates.of(experiment)
  own = candidates.of(experiment)[1:3]
  assert {c[1:3] for c in places} == {*expected, own}
  assert len(places) == len(set(places))
  schemes = {c.scheme for c in places}
  assert schemes == {config['scheme']} or schemes == {'sync', 'fused'}
  for place in (places[0], places[-1]):
    for variant in candidates.variants(experiment, machine, place):
      assert [len(variant), variant.actors_per_device] == [7, 1]
      _same_but_placed(experiment, variant)


def _same_but_placed(experiment, candidate):
  """Builds the experiment with a placement, and compares what is no placement."""
  scheme, *fields = candidate
  placement = dict(zip(candidates.Candidate._fields[1:], fields, strict=True))
  placed = changed_experiment(experiment, scheme=scheme, placement=placement)
  assert candidates.of(placed) == candidate
  rest = {name: value for name, value in experiment.fields.items()
          if name not in ('scheme', 'placement')}
  assert {name: placed.fields[name] for name in rest} == rest


def test_candidates_of_atari_on_two_cores():
  places = candidates.places(resolve(impala_atari.get_config()), Machine(2, 2))
  assert {c[1:3] for c in places} == {
      DEVICE_0, ((1,), (0,)), ((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))}


def test_variants_of_threads_and_calls_depend_on_the_cores():
  def varied(config, cores, name):
    experiment = resolve(config)
    own = candidates.of(experiment)
    return {getattr(c, name) for c in candidates.variants(
        experiment, Machine(cores, cores), own)}
  atari = impala_atari.get_config().to_dict()
  one = changed(atari, placement__env_threads=1, placement__xla_threads=2)
  assert varied(one, 2, 'env_threads') == {1, 2, 4}
  assert varied(one, 2, 'xla_threads') == {2, 4, 16}
  assert varied(one, 16, 'env_threads') == {1, 8, 16, 32}
  assert varied(one, 64, 'env_threads') == {1, 32, 64}  # not more threads than environments
  assert varied(one, 2, 'updates_per_call') == {1}
  fused = changed(ppo_cartpole.get_config().to_dict(), placement__updates_per_call=16)
  assert varied(fused, 2, 'updates_per_call') == {4, 16, 64}


def test_gpus_have_several_actors_and_cpu_actors_their_own_devices():
  experiment = resolve(_catch(num_shards=2, num_grad_shards=2, placement__actor_devices=(0,),
                              placement__learner_devices=(0,)))
  places = candidates.places(experiment, Machine(16, 16, gpus=2))
  assert {c[1:4] for c in places} == {
      ((0,), (0,), 1), ((1,), (0,), 1), ((0, 1), (0,), 1), ((0,), (0, 1), 1), ((0, 1), (0, 1), 1),
      ((0,), (0,), 2), ((1,), (0,), 2), ((0,), (0, 1), 2)}
  mixed = resolve(_catch(num_shards=2, num_grad_shards=2, placement__actor_platform='cpu',
                         placement__actor_devices=(0,), placement__learner_devices=(0,)))
  assert {c[1:4] for c in candidates.places(mixed, Machine(16, 16, gpus=1))} >= {
      ((0,), (0,), 1), ((0, 1), (0,), 1)}


def test_flags_parse_back():
  arguments = ['--config=pong_laptop']
  chosen = candidates.Candidate('fused', (0, 1), (0, 1), 1, 4, 8, 16)
  given = chosen.flags('sync')
  config = flags.parse(['x', *arguments, *given], FlagValues())
  assert config['scheme'] == 'fused'
  assert {name: config['placement'][name] for name in chosen._fields[1:]} == {
      name: value for name, value in chosen._asdict().items() if name != 'scheme'}
  assert len(given) == 7 and len(chosen._replace(scheme='sync').flags('sync')) == 6
  case = Case(arguments, None)
  assert case._placement(given) == chosen
  assert case._placement([]) == SHIPPED


SPEEDS = {'a': 100.0, 'b': 130.0, 'c': 120.0, 'd': 0.0, 'e': 90.0, 'b2': 140.0, 'b3': 150.0,
          SHIPPED: 120.0}


def _vary(place):
  return [place, f'{place}2', f'{place}3']


def _ended(speeds=None, limit=1000):
  """Returns all measurements of a search that begins with some."""
  speeds = list(speeds or [])
  while len(speeds) < limit and (following := Search('abcde', _vary, speeds).next()):
    stage, placement = following
    speeds.append(Speed(stage, placement, SPEEDS[placement]))
  return speeds


def test_a_search_measures_finalists_again_and_pairs_at_last():
  speeds = _ended()
  of_stage = {stage: [x.placement for x in speeds if x.stage == stage]
              for stage in (DEVICES, THREADS, PAIR)}
  assert of_stage[DEVICES] == list('abcde') + list('bcabca')
  assert of_stage[THREADS] == ['b', 'b2', 'b3'] + ['b3', 'b2', 'b'] * 2
  assert of_stage[PAIR][:4] == [SHIPPED, 'b3', 'b3', SHIPPED]
  assert sorted(of_stage[PAIR]) == [SHIPPED] * PAIRS + ['b3'] * PAIRS
  search = Search('abcde', _vary, speeds)
  assert search.best() == 'b3'
  assert search.ratios() == [120 / 150] * PAIRS


@pytest.mark.parametrize('count', [0, 1, 7, 12, 20, 21, 30])
def test_a_search_goes_on_where_it_stopped(count):
  whole = _ended()
  assert _ended(whole[:count]) == whole
  search = Search('abcde', _vary, whole[:count])
  assert (search.best() is None) == (count < 20)


def test_medians_decide_among_finalists():
  speeds = [Speed(DEVICES, place, sps) for place, sps in (
      ('a', 200.0), ('b', 100.0), ('c', 150.0), ('a', 10.0), ('a', 20.0), ('c', 140.0),
      ('c', 130.0), ('b', 99.0), ('b', 98.0))]
  search = Search('abc', lambda place: [place], speeds)
  assert search.best() == 'c' and search.next() == (PAIR, SHIPPED)


def test_what_fails_is_not_measured_again_and_never_the_best():
  speeds = [Speed(DEVICES, 'a', 0.0), Speed(DEVICES, 'b', 5.0)]
  search = Search('ab', lambda place: [place], speeds)
  assert search.next() == (DEVICES, 'b')
  speeds += [Speed(DEVICES, 'b', 5.0)] * 2
  assert Search('ab', lambda place: [place], speeds).best() == 'b'
  failed = [Speed(PAIR, SHIPPED, 0.0), Speed(PAIR, 'b', 5.0)]
  assert Search('ab', lambda place: [place], speeds + failed).ratios() == []


def test_nothing_is_paired_if_the_shipped_placement_is_the_best():
  search = Search('a', lambda place: [place], [])
  assert search.next() is None and search.best() == 'a' and not search.ratios()
  assert FINALISTS < len(SPEEDS)


def _case(tmp_path, lines=()):
  """Returns the search for impala_catch, after what was measured."""
  path = tmp_path / 'results.jsonl'
  processes.write(path, [dict(config='--config=impala_catch', **line) for line in lines])
  case = Case(['--config=impala_catch'], path)
  case._machine = Machine(2, 2)
  return case


def test_a_search_keeps_its_candidates_whatever_is_free_later(tmp_path, monkeypatch):
  """The search begins with one core, for which there is one placement of devices."""
  monkeypatch.setattr(processes, 'measure', lambda *_: dict(sps=1.0))
  case = _case(tmp_path)
  case._machine = Machine(1, 1)
  stage, placement = case.search().next()
  assert stage == THREADS
  case.measure(stage, placement, tmp_path / 'process', 1.0)
  later = Case(['--config=impala_catch'], tmp_path / 'results.jsonl')
  later._machine = Machine(8, 8)
  assert later.search().next()[0] == THREADS
  assert len(later.search().candidates(DEVICES)) == 1
  assert later.search().candidates(THREADS) == case.search().candidates(THREADS)


def test_the_table_tells_what_failed(tmp_path):
  own, other = (c.flags('cleanba') for c in _case(tmp_path).search().candidates(DEVICES)[:2])
  failed = [dict(stage=DEVICES, flags=flags, sps=0.0) for flags in (own, other)]
  case = _case(tmp_path, [dict(stage=DEVICES, candidates=[own, other]), *failed])
  assert case.fails and row(case)[1:] == ['', '', 'every training failed']
  # The shipped placement fails in all pairs.
  works = [dict(stage=DEVICES, flags=other, sps=5.0)] * 3
  case = _case(tmp_path, [
      dict(stage=DEVICES, candidates=[own, other]), dict(stage=THREADS, candidates=[other]),
      failed[0], *works, *[dict(stage=PAIR, flags=flags, sps=sps)
                           for flags, sps in (([], 0.0), (other, 5.0)) for _ in range(PAIRS)]])
  assert not case.fails and row(case)[1:3] == ['', '0 of 7']
  assert row(case)[3] != SHIPPED


@pytest.mark.full
def test_the_command_goes_on_and_prints_flags(tmp_path):
  """One core leaves few placements; the first call is interrupted after two measurements."""
  command = [sys.executable, '-m', 'benchmarks.tune', f'--folder={tmp_path}', '--seconds=0.2',
             '--config=impala_catch:smoke', '--config.total_steps=1000']
  core = {min(os.sched_getaffinity(0))}
  results = tmp_path / 'results.jsonl'
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.PIPE,
                        preexec_fn=lambda: os.sched_setaffinity(0, core)) as process:
    for _ in range(2):
      process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
  assert process.returncode == 3, err
  assert 'not measured yet' in out and 'goes on' in err
  before = [json.loads(line) for line in results.read_text().splitlines()]
  assert len(before) >= 3 and 'candidates' in before[0]
  assert all(line['sps'] > 0 for line in before if 'candidates' not in line)
  # What is free now makes no difference to a search that has begun.
  process = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
  assert process.returncode == 0, process.stderr
  after = [json.loads(line) for line in results.read_text().splitlines()]
  assert after[:len(before)] == before
  row = process.stdout.splitlines()[-1]
  pairs = [line for line in after if line['stage'] == PAIR]
  if pairs:
    ratios = [a['sps'] / b['sps'] for a, b in zip(
        [x for x in pairs if not x['flags']], [x for x in pairs if x['flags']], strict=True)]
    assert f'| {statistics.median(ratios):.3f} |' in row
    assert ' '.join(pairs[0]['flags'] or pairs[1]['flags']).replace("'", '') in row.replace("'", '')
  else:
    assert 'as shipped' in row
  planned = {line['stage']: line['candidates'] for line in after if 'candidates' in line}
  assert len(planned) == sum('candidates' in line for line in after)
  for stage, candidates_of_stage in planned.items():
    measured = {tuple(line['flags']) for line in after if line['stage'] == stage and 'sps' in line}
    # A single candidate needs no measurement.
    expected = set() if len(candidates_of_stage) == 1 else set(map(tuple, candidates_of_stage))
    assert measured == expected
  table = subprocess.run([*command, '--table'], capture_output=True, text=True, check=True)
  assert table.stdout == process.stdout


@pytest.mark.parametrize('args, words', [
    (['--configs=ppo_catrpole'], "--configs: there is no 'ppo_catrpole'"),
    (['--config=impala_catch', '--configs=ppo_cartpole'], 'give one of the two'),
    (['--config=apex_dqn_catch', '--config.scheme=apex'], 'acts and learns at separate rates'),
    (['--config=impala_catch', '--config.num_env=3'], 'num_env')])
def test_bad_flags_give_one_line(args, words, tmp_path):
  process = run_benchmark('tune', f'--folder={tmp_path}', *args)
  assert process.returncode == 2 and not process.stdout
  assert words in process.stderr and len(process.stderr.strip().splitlines()) == 1
