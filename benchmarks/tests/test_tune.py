"""The tuner: it tries possible placements, changes nothing else, and prints flags."""

import copy
import itertools
import shlex
import subprocess

import pytest
from absl.flags import FlagValues

from benchmarks.parts import segments
from benchmarks.tests.run import run_benchmark
from benchmarks.tune import candidates, search, tuner
from podracer_jit.configs import impala_atari, impala_catch, pong_laptop, ppo_cartpole
from podracer_jit.experiment import flags
from podracer_jit.experiment.resolve import resolve
from podracer_jit.schemes.table import SCHEMES
from tests.runs import changed, small

pytestmark = pytest.mark.full
DEVICE_0 = ((0,), (0,))


def _cores(count):
  return candidates.Machine(count, count, count, True, False)


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
    'alone with two groups': (_laptop(scheme='fused', placement__actor_devices=(0,),
                                      placement__learner_devices=(0,)), 4, [
        DEVICE_0, DEVICE_0, ((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))]),
    'colocated': (_laptop(scheme='ddppo'), 4, [((0, 1), (0, 1)), DEVICE_0]),
    'as many workers': (_laptop(scheme='dppo_async'), 4, [((0, 1), (0, 1)), ((0, 0), (0, 0))]),
    'as many groups': (_laptop(exact_reduce=False), 4, [((0, 1), (0, 1)), ((0,), (0, 1))]),
}


@pytest.mark.parametrize('case', CASES)
def test_candidates_are_all_possible_placements(case):
  config, cores, expected = CASES[case]
  before = copy.deepcopy(config)
  machine = _cores(cores)
  experiment, own = tuner.prepare(config)
  its_tuner = tuner.Tuner(experiment)
  accepted = tuner.accept(its_tuner, candidates.places(experiment, own, machine))
  assert accepted[0] == own == candidates.own_of(resolve(config))
  assert [(c.actor_devices, c.learner_devices) for c in accepted] == expected
  schemes = {c.scheme for c in accepted}
  assert schemes == {config['scheme']} or schemes == {'sync', 'fused'}
  assert all(c[:2] == DEVICE_0 for c in accepted if c.scheme == 'fused')
  for candidate in (accepted[0], accepted[-1]):
    variants = candidates.vary(experiment, machine, candidate)
    assert tuner.accept(its_tuner, variants) == variants
    for variant in (candidate, *variants):
      assert variant.num_shards == config['num_shards']
      assert _unplaced(candidates.placed(resolve(config), variant).fields) == _unplaced(config)
  assert config == before


def test_candidates_of_atari_on_two_cores():
  experiment, own = tuner.prepare(impala_atari.get_config())
  places = candidates.places(experiment, own, _cores(2))
  assert [c[:2] for c in places] == [
      DEVICE_0, ((1,), (0,)), ((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))]


def _unplaced(config):
  """Returns a config without the fields that the tuner may change."""
  free = candidates.Candidate._fields[:-2]
  return {k: v for k, v in config.items() if k != 'scheme'} | dict(
      placement={k: v for k, v in config['placement'].items() if k not in free})


def test_variants_of_threads_and_calls_depend_on_the_cores():
  def threads(config, cores):
    experiment, own = tuner.prepare(config)
    return [c.env_threads for c in candidates.vary(experiment, _cores(cores), own)]
  atari = impala_atari.get_config().to_dict()
  assert threads(atari, 2) == [2, 4]  # the config's 0 means 1 in each of two pools
  assert threads(atari, 16) == [1, 16, 32]
  assert threads(changed(atari, placement__env_threads=16), 16) == [1, 8, 32]
  assert threads(atari, 64) == [1, 64]  # not more threads than environments
  config = changed(ppo_cartpole.get_config().to_dict(), placement__env_threads=0)
  fused, own = tuner.prepare(config)
  variants = candidates.vary(fused, _cores(4), own)
  assert [(c.env_threads, c.updates_per_call) for c in variants] == [
      (1, 16), (8, 16), (0, 4), (0, 64)]
  assert [c.env_threads for c in candidates.vary(
      fused, _cores(4), own._replace(scheme='sync'))] == [1, 8]


def test_fused_is_tried_for_sync_first_with_one_update_per_call():
  experiment, own = tuner.prepare(_catch(scheme='sync'))
  _, fused = candidates.places(experiment, own, _cores(1))
  assert fused == own._replace(scheme='fused', updates_per_call=1)
  assert {c.updates_per_call for c in candidates.vary(experiment, _cores(1), fused)} == {1, 4}


def test_gpus_have_several_actors_and_cpu_actors_their_own_devices():
  prepared = tuner.prepare(changed(_catch(), num_shards=2, num_grad_shards=2))
  gpus = candidates.Machine(16, 2, 2, True, True)
  assert [c[:3] for c in candidates.places(*prepared, gpus)] == [
      ((0,), (0,), 1), ((1,), (0,), 1), ((0, 1), (0,), 1), ((0,), (0, 1), 1), ((0, 1), (0, 1), 1),
      ((0,), (0,), 2), ((1,), (0,), 2), ((0,), (0, 1), 2)]
  mixed = candidates.Machine(16, 16, 1, False, False)
  assert [c[:3] for c in candidates.places(*prepared, mixed)] == [
      ((0,), (0,), 1), ((0, 1), (0,), 1)]


def test_num_shards_changes_only_if_asked_for():
  experiment, own = tuner.prepare(_catch())
  places = candidates.places(experiment, own, _cores(2), [1, 2])
  assert [(c[:2], c.num_shards) for c in places] == [
      (DEVICE_0, 1), (((1,), (0,)), 1), (DEVICE_0, 2), (((1,), (0,)), 2), (((0, 1), (0,)), 2)]
  assert tuner.accept(tuner.Tuner(experiment), places) == places


def test_an_impossible_own_placement_is_left_out(capsys):
  experiment, own = tuner.prepare(changed(_catch(), placement__learner_devices=(0, 1)))
  accepted = tuner.accept(tuner.Tuner(experiment), candidates.places(experiment, own, _cores(1)))
  assert [c[:2] for c in accepted] == [DEVICE_0]
  assert 'num_grad_shards' in capsys.readouterr().err
  config = changed(_catch(), placement__learner_devices=(), exact_reduce=False)
  with pytest.raises(ValueError, match='placement.learner_devices'):
    tuner.prepare(config)
  config = changed(_catch(), placement__learner_devices=(0, 1), exact_reduce=False)
  experiment, own = tuner.prepare(config)
  with pytest.raises(ValueError, match='num_grad_shards'):
    tuner.accept(tuner.Tuner(experiment), candidates.places(experiment, own, _cores(1)))


A, B, C, D, E = (candidates.Candidate((i,), (0,), 1, 0, 16, 1, 'sync') for i in range(5))


def test_the_best_candidate_has_the_highest_median():
  rounds = [{A: 10.0, B: 30.0, C: 12.0}, {A: 11.0, B: 1.0, C: 12.0}, {A: 11.0, B: 1.0, C: 9.0}]
  assert search.best(rounds) == C


def test_search_halves_and_widens_within_its_seconds():
  speeds = {A: 1.0, B: 5.0, C: 3.0, D: 2.0, E: 4.0}
  seconds_given = []

  def measure(candidate, seconds):
    seconds_given.append(seconds)
    sps = speeds[candidate._replace(env_threads=0)] + candidate.env_threads
    return search.Figures(sps, seconds)

  def vary(candidate):
    return [candidate._replace(env_threads=n) for n in (1, 2)]

  result = search.search([A, B, C, D, E], vary, [A], measure, 60.0)
  fast, faster = vary(B)
  assert [list(x) for x in result.rounds] == [
      [A, B, C, D, E], [B, E, fast, faster, A], *[[faster, fast, A]] * 3]
  assert result.last == result.rounds[2:] and search.best(result.last) == faster
  assert sum(seconds_given) == pytest.approx(60.0) and seconds_given == sorted(seconds_given)


def test_search_widens_around_the_better_of_two():
  def measure(candidate, seconds):
    return search.Figures(2.0 if candidate.actor_devices == (1,) else 1.0, seconds)

  result = search.search([A, B], lambda c: [c._replace(env_threads=1)], [A], measure, 60.0)
  assert list(result.rounds[1]) == [B, A, B._replace(env_threads=1)]


def test_search_ends_with_the_round_that_uses_up_its_seconds():
  def measure(candidate, seconds):
    return search.Figures(1.0 + candidate.actor_devices[0], 100.0)

  result = search.search([A, B, C], lambda c: [], [A], measure, 60.0)
  assert result.rounds == result.last == [{A: 1.0, B: 2.0, C: 3.0}]
  assert search.best(result.last) == C


@pytest.mark.parametrize('chosen', [
    candidates.Candidate((0, 1), (0,), 1, 0, 16, 1, 'cleanba'),
    candidates.Candidate((1,), (0, 1), 2, 3, 64, 1, 'cleanba'),
    candidates.Candidate((0,), (0,), 1, 0, 1, 1, 'fused'),
    candidates.Candidate((0,), (0,), 1, 0, 16, 4, 'cleanba')])
def test_flags_parse_back_and_change_nothing_else(chosen):
  argv = ['tune', '--config=configs/impala_catch.py:smoke', '--config.num_grad_shards=2']
  config = flags.parse(argv, FlagValues())
  experiment = resolve(config)
  line = candidates.as_flags(candidates.own_of(experiment), chosen)
  parsed = flags.parse([*argv, *shlex.split(line)], FlagValues())
  assert candidates.own_of(resolve(parsed)) == chosen
  assert parsed == candidates.placed(experiment, chosen).fields
  shards = config['num_shards']
  assert _unplaced(parsed) | dict(num_shards=shards) == _unplaced(config)
  assert ('num_shards' in line) == (chosen.num_shards != shards)
  # A shell passes the flags on unchanged.
  echoed = subprocess.run(['bash', '-c', f'printf "%s\\n" {line}'], capture_output=True, text=True)
  assert echoed.stdout.split() == shlex.split(line)


def test_own_placement_needs_no_flags():
  own = candidates.own_of(resolve(_catch()))
  assert candidates.as_flags(own, own) == ''


def test_a_tuned_replay_is_small_and_quickly_filled():
  config = small('dqn', num_grad_shards=2)
  config = changed(config, num_minibatches=1, replay__min_size=50_000)
  tuned = tuner.prepare(config)[0].fields['replay']
  assert tuned == config['replay'] | dict(capacity=segments.CAPACITY, min_size=64)
  small_replay = changed(config, replay__capacity=2_000, replay__min_size=50)
  assert tuner.prepare(small_replay)[0].fields['replay'] == small_replay['replay']


@pytest.mark.parametrize('scheme, loss', [
    ('sync', 'impala'), ('fused', 'ppo'), ('impala', 'impala'), ('rapid_async', 'impala'),
    ('apex_lockstep', 'dqn')])
def test_every_kind_of_scheme_can_be_measured(scheme, loss):
  config = small(loss)
  config = changed(config, scheme=scheme, placement__updates_per_call=2)
  if 'replay' in config:
    config = changed(config, num_minibatches=1, replay__batch_size=8)
  experiment, own = tuner.prepare(config)
  figures = tuner.Tuner(experiment).measure(own, 0.05)
  assert figures.sps > 0 and figures.seconds >= 0.05


def test_candidates_share_the_learner():
  experiment, own = tuner.prepare(_catch())
  its_tuner = tuner.Tuner(experiment)
  runs = [its_tuner.run(c) for c in (
      own, own._replace(env_threads=2), own._replace(actor_devices=(1,)))]
  assert len({id(x.learner) for x in runs}) == 1
  assert [x.place.env_threads for x in runs][1] == 2
  assert runs[2].place.actors != runs[0].place.actors


def test_a_candidate_runs_with_its_own_scheme():
  experiment, own = tuner.prepare(_catch(scheme='sync'))
  its_tuner = tuner.Tuner(experiment)
  for candidate in candidates.places(experiment, own, _cores(1)):
    placed = its_tuner.run(candidate).experiment
    assert placed.scheme == SCHEMES[candidate.scheme] and placed.scheme_name == candidate.scheme
    assert its_tuner.measure(candidate, 0.05).sps > 0


def _run(*args):
  done = run_benchmark('tune', *args)
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize('distances, message', [
    ([160, 170], False), ([160, 500], True), ([510, 480], False), ([0, 0], False)])
def test_a_changed_core_distance_is_reported(distances, message, monkeypatch, capsys):
  measured = itertools.cycle(distances)
  monkeypatch.setattr(tuner.core_distance, 'apart_ns', lambda: next(measured))
  monkeypatch.setattr(tuner.Tuner, 'measure', lambda *args: search.Figures(1.0, 1.0))
  experiment, own = tuner.prepare(_catch())
  first = candidates.places(experiment, own, _cores(2))
  tuner.run(tuner.Tuner(experiment), own, _cores(2), first, 20.0)
  assert ('distance of two cores changed' in capsys.readouterr().err) == message


def test_the_tuner_prints_flags():
  code, out, err = _run('--config=configs/impala_catch.py:smoke', '--seconds=0.2',
                        '--num_shards=1,2')
  assert code == 0, err
  head, *rows, last = out.splitlines()
  assert head.split()[0] == 'placement' and "the config's own" in out
  assert any('num_shards=2' in row for row in rows)
  assert last.startswith("the config's own placement is the fastest") or (
      '--config.' in last and all(flag.startswith('--config.') for flag in shlex.split(last)))
  assert ('num_shards' in last) == ('belongs to the experiment' in out)
  assert 'placements, then' in err


@pytest.mark.parametrize('args, names', [
    (['--config=configs/impala_catch.py', '--config.scheme=cleanbaa'], ['scheme', 'cleanbaa']),
    (['--config=configs/impala_catch.py', '--config.unroll_length=0'], ['unroll_length']),
    (['--config=configs/impala_catch.py', '--num_shards=1,x'], ['--num_shards', '1,x']),
    (['--config=configs/impala_catch.py', '--config.placement.xla_threads=0'],
     ['placement.xla_threads']),
    (['--config=configs/apex_dqn_atari.py'], ['scheme', 'apex_lockstep']),
    (['--config=configs/missing.py'], ['--config'])])
def test_bad_flags_of_the_tuner_give_one_line(args, names):
  code, out, err = _run(*args)
  assert code == 2 and not out
  assert len(err.splitlines()) == 1 and all(name in err for name in names)
