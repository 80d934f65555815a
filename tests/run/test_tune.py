"""The tuner: what it tries can be and changes nothing but the placement, and its flags say it."""

import copy
import itertools
import shlex
import subprocess
import sys

import pytest
from absl import flags

from podracer_jit.configs import impala_atari, impala_catch, pong_laptop, ppo_cartpole
from podracer_jit.run import command_line
from podracer_jit.run.measure import segments
from podracer_jit.run.resolve import resolve
from podracer_jit.run.tuning import candidates, search, tuner
from podracer_jit.schemes.table import SCHEMES
from tests import processes
from tests.runs import changed, small

OWN = ((0,), (0,))


def _cores(count):
  return candidates.Machine(count, count, count, True, False)


def _catch(**fields):
  return changed(impala_catch.get_config('smoke').to_dict(), **fields)


def _laptop(**fields):
  return changed(pong_laptop.get_config().to_dict(), **fields)


CASES = {
    'one pool and group': (_catch(), 4, [OWN, ((1,), (0,))]),
    'one core': (_catch(), 1, [OWN]),
    'two pools and four groups on four': (_catch(num_shards=2, num_grad_shards=4), 4, [
        OWN, ((1,), (0,)), ((0, 1), (0,)), ((1, 2), (0,)),
        ((0,), (0, 1)), ((2,), (0, 1)), ((0, 1), (0, 1)), ((2, 3), (0, 1)),
        ((0,), (0, 1, 2, 3)), ((0, 1), (0, 1, 2, 3))]),
    'with lag 0 nothing is apart': (_laptop(), 4, [
        ((0, 1), (0, 1)), OWN, ((0, 1), (0,)), ((0,), (0, 1)), OWN]),
    'alone': (ppo_cartpole.get_config().to_dict(), 4, [OWN, OWN]),
    'alone with two groups': (_laptop(scheme='fused', placement__actor_devices=(0,),
                                      placement__learner_devices=(0,)), 4, [
        OWN, OWN, ((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))]),
    'colocated': (_laptop(scheme='ddppo'), 4, [((0, 1), (0, 1)), OWN]),
    'as many workers': (_laptop(scheme='dppo_async'), 4, [((0, 1), (0, 1)), ((0, 0), (0, 0))]),
    'as many groups': (_laptop(exact_reduce=False), 4, [((0, 1), (0, 1)), ((0,), (0, 1))]),
}


@pytest.mark.parametrize('case', CASES)
def test_candidates_are_those_that_can_be(case):
  config, cores, expected = CASES[case]
  before, machine = copy.deepcopy(config), _cores(cores)
  experiment, own = tuner.prepare(config)
  made = tuner.Tuner(experiment)
  found = tuner.accept(made, candidates.places(experiment, own, machine))
  assert found[0] == own == candidates.own_of(resolve(config))
  assert [(c.actor_devices, c.learner_devices) for c in found] == expected
  schemes = {c.scheme for c in found}
  assert schemes == {config['scheme']} or schemes == {'sync', 'fused'}
  assert all(c[:2] == OWN for c in found if c.scheme == 'fused')
  for candidate in (found[0], found[-1]):
    others = candidates.vary(experiment, machine, candidate)
    assert tuner.accept(made, others) == others
    for other in (candidate, *others):
      assert other.num_shards == config['num_shards']
      assert _unplaced(candidates.placed(resolve(config), other).fields) == _unplaced(config)
  assert config == before


def test_candidates_of_atari_on_two_cores():
  experiment, own = tuner.prepare(impala_atari.get_config())
  found = candidates.places(experiment, own, _cores(2))
  assert [c[:2] for c in found] == [
      OWN, ((1,), (0,)), ((0, 1), (0,)), ((0,), (0, 1)), ((0, 1), (0, 1))]


def _unplaced(config):
  """A config without what may be changed."""
  free = candidates.Candidate._fields[:-2]
  return {k: v for k, v in config.items() if k != 'scheme'} | dict(
      placement={k: v for k, v in config['placement'].items() if k not in free})


def test_other_threads_and_calls_are_by_the_cores():
  def threads(config, cores):
    experiment, own = tuner.prepare(config)
    return [c.env_threads for c in candidates.vary(experiment, _cores(cores), own)]
  atari = impala_atari.get_config().to_dict()
  assert threads(atari, 2) == [2, 4]  # its own 0 is 1 in each of two pools
  assert threads(atari, 16) == [1, 16, 32]
  assert threads(changed(atari, placement__env_threads=16), 16) == [1, 8, 32]
  assert threads(atari, 64) == [1, 64]  # no more than environments
  fused = changed(ppo_cartpole.get_config().to_dict(), placement__env_threads=0)
  fused, own = tuner.prepare(fused)
  found = candidates.vary(fused, _cores(4), own)
  assert [(c.env_threads, c.updates_per_call) for c in found] == [(1, 16), (8, 16), (0, 4), (0, 64)]
  assert [c.env_threads for c in candidates.vary(
      fused, _cores(4), own._replace(scheme='sync'))] == [1, 8]


def test_one_program_is_tried_for_two_with_a_call_of_one_update_first():
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


def test_shards_are_changed_where_asked_alone():
  experiment, own = tuner.prepare(_catch())
  found = candidates.places(experiment, own, _cores(2), [1, 2])
  assert [(c[:2], c.num_shards) for c in found] == [
      (OWN, 1), (((1,), (0,)), 1), (OWN, 2), (((1,), (0,)), 2), (((0, 1), (0,)), 2)]
  assert tuner.accept(tuner.Tuner(experiment), found) == found


def test_own_placement_that_cannot_be_is_left_out(capsys):
  experiment, own = tuner.prepare(changed(_catch(), placement__learner_devices=(0, 1)))
  found = tuner.accept(tuner.Tuner(experiment), candidates.places(experiment, own, _cores(1)))
  assert [c[:2] for c in found] == [OWN]
  assert 'num_grad_shards' in capsys.readouterr().err
  config = changed(_catch(), placement__learner_devices=(), exact_reduce=False)
  with pytest.raises(ValueError, match='placement.learner_devices'):
    tuner.prepare(config)
  config = changed(_catch(), placement__learner_devices=(0, 1), exact_reduce=False)
  experiment, own = tuner.prepare(config)
  with pytest.raises(ValueError, match='num_grad_shards'):
    tuner.accept(tuner.Tuner(experiment), candidates.places(experiment, own, _cores(1)))


A, B, C, D, E = (candidates.Candidate((i,), (0,), 1, 0, 16, 1, 'sync') for i in range(5))


def test_the_best_has_the_highest_median():
  rounds = [{A: 10.0, B: 30.0, C: 12.0}, {A: 11.0, B: 1.0, C: 12.0}, {A: 11.0, B: 1.0, C: 9.0}]
  assert search.best(rounds) == C


def test_search_halves_and_widens_within_its_seconds():
  speeds, asked = {A: 1.0, B: 5.0, C: 3.0, D: 2.0, E: 4.0}, []

  def measure(candidate, seconds):
    asked.append(seconds)
    sps = speeds[candidate._replace(env_threads=0)] + candidate.env_threads
    return search.Figures(sps, seconds)

  def vary(candidate):
    return [candidate._replace(env_threads=n) for n in (1, 2)]

  found = search.search([A, B, C, D, E], vary, [A], measure, 60.0)
  fast, faster = vary(B)
  assert [list(x) for x in found.rounds] == [
      [A, B, C, D, E], [B, E, fast, faster, A], *[[faster, fast, A]] * 3]
  assert found.last == found.rounds[2:] and search.best(found.last) == faster
  assert sum(asked) == pytest.approx(60.0) and asked == sorted(asked)


def test_search_knows_the_better_of_two_before_it_widens():
  def measure(candidate, seconds):
    return search.Figures(2.0 if candidate.actor_devices == (1,) else 1.0, seconds)

  found = search.search([A, B], lambda c: [c._replace(env_threads=1)], [A], measure, 60.0)
  assert list(found.rounds[1]) == [B, A, B._replace(env_threads=1)]


def test_search_ends_with_the_round_that_spends_its_seconds():
  def measure(candidate, seconds):
    return search.Figures(1.0 + candidate.actor_devices[0], 100.0)

  found = search.search([A, B, C], lambda c: [], [A], measure, 60.0)
  assert found.rounds == found.last == [{A: 1.0, B: 2.0, C: 3.0}]
  assert search.best(found.last) == C


@pytest.mark.parametrize('chosen', [
    candidates.Candidate((0, 1), (0,), 1, 0, 16, 1, 'cleanba'),
    candidates.Candidate((1,), (0, 1), 2, 3, 64, 1, 'cleanba'),
    candidates.Candidate((0,), (0,), 1, 0, 1, 1, 'fused'),
    candidates.Candidate((0,), (0,), 1, 0, 16, 4, 'cleanba')])
def test_flags_parse_back_and_change_nothing_else(chosen):
  argv = ['tune', '--config=configs/impala_catch.py:smoke', '--config.num_grad_shards=2']
  config = command_line.parse(argv, flags.FlagValues())
  experiment = resolve(config)
  line = candidates.as_flags(candidates.own_of(experiment), chosen)
  parsed = command_line.parse([*argv, *shlex.split(line)], flags.FlagValues())
  assert candidates.own_of(resolve(parsed)) == chosen
  assert parsed == candidates.placed(experiment, chosen).fields
  shards = config['num_shards']
  assert _unplaced(parsed) | dict(num_shards=shards) == _unplaced(config)
  assert ('num_shards' in line) == (chosen.num_shards != shards)
  # The shell gives them on as they are.
  echoed = subprocess.run(['bash', '-c', f'printf "%s\\n" {line}'], capture_output=True, text=True)
  assert echoed.stdout.split() == shlex.split(line)


def test_own_placement_needs_no_flags():
  own = candidates.own_of(resolve(_catch()))
  assert candidates.as_flags(own, own) == ''


def test_a_replay_is_small_and_soon_filled():
  config = small('dqn', num_grad_shards=2)
  config = changed(config, num_minibatches=1, replay__min_size=50_000)
  found = tuner.prepare(config)[0].fields['replay']
  assert found == config['replay'] | dict(capacity=segments.CAPACITY, min_size=64)
  few = changed(config, replay__capacity=2_000, replay__min_size=50)
  assert tuner.prepare(few)[0].fields['replay'] == few['replay']


@pytest.mark.parametrize('scheme, loss', [
    ('sync', 'impala'), ('fused', 'ppo'), ('impala', 'impala'), ('rapid_async', 'impala'),
    ('apex_lockstep', 'dqn')])
def test_every_kind_of_scheme_is_measured(scheme, loss):
  config = small(loss)
  config = changed(config, scheme=scheme, placement__updates_per_call=2)
  if 'replay' in config:
    config = changed(config, num_minibatches=1, replay__batch_size=8)
  experiment, own = tuner.prepare(config)
  found = tuner.Tuner(experiment).measure(own, 0.05)
  assert found.sps > 0 and found.seconds >= 0.05


def test_candidates_share_the_learner():
  experiment, one = tuner.prepare(_catch())
  made = tuner.Tuner(experiment)
  runs = [made.run(c) for c in (one, one._replace(env_threads=2), one._replace(
      actor_devices=(1,)))]
  assert len({id(x.learner) for x in runs}) == 1
  assert [x.place.env_threads for x in runs][1] == 2
  assert runs[2].place.actors != runs[0].place.actors


def test_a_candidate_is_run_by_its_own_scheme():
  experiment, own = tuner.prepare(_catch(scheme='sync'))
  made = tuner.Tuner(experiment)
  for candidate in candidates.places(experiment, own, _cores(1)):
    found = made.run(candidate).experiment
    assert found.scheme == SCHEMES[candidate.scheme] and found.scheme_name == candidate.scheme
    assert made.measure(candidate, 0.05).sps > 0


def _run(*args):
  done = processes.run([sys.executable, '-P', '-m', 'podracer_jit', 'tune', *args])
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize('distances, said', [
    ([160, 170], False), ([160, 500], True), ([510, 480], False), ([0, 0], False)])
def test_cores_that_moved_are_told(distances, said, monkeypatch, capsys):
  asked = itertools.cycle(distances)
  monkeypatch.setattr(tuner.core_distance, 'apart_ns', lambda: next(asked))
  monkeypatch.setattr(tuner.Tuner, 'measure', lambda *args: search.Figures(1.0, 1.0))
  experiment, own = tuner.prepare(_catch())
  first = candidates.places(experiment, own, _cores(2))
  tuner.run(tuner.Tuner(experiment), own, _cores(2), first, 20.0)
  assert ('distance of two cores changed' in capsys.readouterr().err) == said


def test_a_real_run_ends_with_flags():
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
def test_what_cannot_start_is_said_in_a_line(args, names):
  code, out, err = _run(*args)
  assert code == 2 and not out
  assert len(err.splitlines()) == 1 and all(name in err for name in names)
