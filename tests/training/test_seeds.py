"""Several seeds in one program: each is the agent that it would be alone, and nothing is lost."""

import dataclasses
import os
import shutil
import sys

import jax
import numpy as np
import pytest
from gymnasium import spaces

from podracer_jit import experiment
from podracer_jit.experiment import build, memory
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime import host
from podracer_jit.training import seeds, stopping, trainer
from podracer_jit.training.sinks import Diverged
from podracer_jit.workdir import checkpoints, journal, record
from podracer_jit.workdir.workdir import Workdir, make_request
from tests import processes
from tests.envs.masked import LIMIT
from tests.runs import (
  StopAt,
  changed,
  fresh,
  initial_state,
  open_workdir,
  prepared,
  run,
  small,
  train_in,
)
from tests.runtime.test_stored_programs import events
from tests.tiers import essential

NOTHING = make_request()
PUSH = dict(env__task=f'{__name__}:Push')
SEQUENCES = dict(network__core='gru', network__core_size=8, loss__burn_in=2, loss__trace_length=6,
                 replay__min_size=16)


class Walk:
  """Walks along a line from a random place; an episode ends at either end of the line."""

  observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
  action_space = spaces.Discrete(2)
  max_episode_steps = 20

  def reset(self, key):
    place = jax.random.uniform(key, (1,), minval=-1.0)
    return place, (place, 0)

  def step(self, key, state, action):
    place, time = state
    place = place + 0.3 * (2 * action - 1) + jax.random.uniform(key, (1,), maxval=0.1)
    return place, (place, time + 1), place[0], abs(place[0]) > 1.0, False, None


class Push(Walk):
  """Walks by as much as the action says."""

  action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

  def step(self, key, state, action):
    return super().step(key, state, 0.5 + 0.5 * action[0])


def config_of(loss='ppo', **fields):
  """8 or 9 updates of a small task, a checkpoint after every third; a row has 64 steps."""
  network = 'deterministic' if loss == 'dpg' else 'mlp'
  config = small(loss, f'{__name__}:Walk', network, num_grad_shards=2, num_shards=2)
  config['total_steps'] = 464  # seeds need different numbers of updates
  config['scheme'] = 'fused'
  config['checkpoint']['every_updates'] = 3
  config['placement']['updates_per_call'] = 2
  config['log']['tensorboard'] = False
  if network == 'mlp':
    config['network']['hidden'] = (16,)
  return changed(config, **fields)


def train(config, workdir, num_seeds, stop=None, options=NOTHING):
  """Trains; returns whether all have finished, and the metrics and receipts by seed."""
  with trainer.opened(resolve(config), workdir, options, num_seeds=num_seeds) as opened:
    finished = opened.train(stop or stopping.Stopping(), quiet=True)
  return finished, [lines_of(each.workdir) for each in opened.runs]


def lines_of(workdir):
  """Returns the metrics of each update, and its receipt."""
  receipts = [line for line in journal.read_lines(workdir / journal.RECEIPTS) if 'batch' in line]
  return journal.read_lines(workdir / journal.METRICS), receipts


class StopAfter(stopping.Stopping):
  """Asks for a stop when the last seed has a checkpoint, as a signal may."""

  def __init__(self, workdir):
    super().__init__()
    self._workdir = workdir

  def asked(self):
    return bool(checkpoints.saved_updates(self._workdir))


@pytest.fixture(scope='module', autouse=True)
def _jax_has_the_sizes_of_all_tests():
  """conftest.py has set them, and JAX may have started since."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(host, 'prepare_host', lambda *args: None)
    yield


@pytest.fixture(scope='module')
def three(tmp_path_factory):
  folder = tmp_path_factory.mktemp('three')
  with events() as names:
    finished, by_seed = train(config_of(), folder, 3)
  assert finished
  # One program makes all updates, although a state that an environment begins with has a Python
  # number.
  assert [event.name for event in names if 'fused' in event.function] == [
      'jaxpr_trace_duration', 'jaxpr_to_mlir_module_duration', 'backend_compile_duration']
  return folder, by_seed


def test_each_seed_is_the_agent_that_it_would_be_alone(three):
  """With equal bits: a CPU takes the seeds one after the other."""
  _, by_seed = three
  first = prepared(config_of())
  for i, (metrics, receipts) in enumerate(by_seed):
    # Nothing but the experiment depends on the seed, so one program is compiled.
    fields = {**first.experiment.fields, 'seed': 1 + i}
    experiment = dataclasses.replace(first.experiment, seed=1 + i, fields=fields)
    alone, reports, _ = run(
        None, updates=4, prepared_run=dataclasses.replace(first, experiment=experiment))
    assert [(line['batch'], line['params']) for line in receipts[:4]] == alone
    losses = [float(x) for report in reports
              for x in np.asarray(jax.device_get(report.metrics['value_loss']))[:report.count]]
    assert [record['value_loss'] for record in metrics[:4]] == losses


@pytest.mark.parametrize('loss, fields', essential([
    ('dqn', {}), ('r2d2', SEQUENCES), ('pqn', dict(network__core='gru', network__core_size=8)),
    ('td3', PUSH)], 'dqn'))
def test_seeds_with_a_replay_or_a_core_are_the_agents_that_they_would_be_alone(tmp_path, loss,
                                                                              fields):
  config = with_a_replay(config_of(loss), **fields)
  _, by_seed = train(config, tmp_path / 'two', 2)
  for seed, (_, receipts) in enumerate(by_seed, 1):
    alone = tmp_path / f'alone{seed}'
    with trainer.opened(resolve(changed(config, seed=seed)), alone, NOTHING) as opened:
      assert opened.train(stopping.Stopping(), quiet=True)
    assert lines_of(alone)[1] == receipts


@pytest.mark.as_shipped
def test_seeds_have_the_bits_of_their_runs_alone_as_shipped(tmp_path):
  """Products of several networks at once would be rounded differently."""
  config = config_of(network__hidden=(64, 64), total_steps=1000)
  _, by_seed = train(config, tmp_path / 'seeds', 2)
  with trainer.opened(resolve(config), tmp_path / 'alone', NOTHING) as opened:
    assert opened.train(stopping.Stopping(), quiet=True)
  assert lines_of(tmp_path / 'alone')[1] == by_seed[0][1]


@pytest.mark.parametrize('num_seeds, cores, devices', [
    (4, 1, 1), (4, 2, 2), (4, 3, 2), (3, 2, 1), (10, 4, 2), (6, 4, 3)])
def test_each_device_takes_as_many_seeds(monkeypatch, num_seeds, cores, devices):
  _with_cores(monkeypatch, cores)
  experiment = _with_open_devices(prepared(config_of()).experiment)
  first = jax.devices()[0]
  assert seeds.devices_of_seeds(num_seeds, first, experiment) == jax.devices()[:devices]
  given = dataclasses.replace(experiment, placement=dataclasses.replace(
      experiment.placement, chosen=()))
  assert seeds.devices_of_seeds(num_seeds, first, given) == [first]


def _with_cores(monkeypatch, cores):
  """Has the process find that it may use so many cores."""
  machine = host.machine()[0]._replace(cores=cores, busy=0)
  monkeypatch.setattr(host, 'machine', lambda: (machine, 1))


def _with_open_devices(experiment):
  """Returns the experiment as if the rule had chosen its devices."""
  return dataclasses.replace(experiment, placement=dataclasses.replace(
      experiment.placement, chosen=('actor_devices', 'learner_devices')))


@pytest.mark.parametrize('loss', ['ppo', 'dqn'])
def test_seeds_on_several_devices_are_those_of_one_and_stop_and_go_on(tmp_path, monkeypatch, loss):
  config = with_a_replay(config_of(loss))
  finished, on_one = train(config, tmp_path / 'one', 4)
  assert finished
  _with_cores(monkeypatch, 2)
  monkeypatch.setattr(seeds, 'on_one_device', _with_open_devices)
  used = []
  real = seeds.devices_of_seeds
  monkeypatch.setattr(seeds, 'devices_of_seeds',
                      lambda *args: used.append(real(*args)) or used[-1])
  last = tmp_path / 'several' / 'seed4'
  assert not train(config, tmp_path / 'several', 4, StopAfter(last))[0]
  finished, on_several = train(config, tmp_path / 'several', 4)
  assert finished and [len(devices) for devices in used] == [2, 2]
  for one, several in zip(on_one, on_several, strict=True):
    assert several[1] == one[1]
    assert [line['grad_norm'] for line in several[0]] == [line['grad_norm'] for line in one[0]]


def test_seeds_are_independent(three):
  _, by_seed = three
  batches = [receipts[0]['batch'] for _, receipts in by_seed]
  assert len(set(batches)) == 3


def test_each_seed_ends_at_its_own_update(three):
  """An episode's end makes a row invalid, so seeds need different numbers of updates."""
  _, by_seed = three
  config = config_of()
  for metrics, receipts in by_seed:
    steps = [record['steps'] for record in metrics]
    assert steps[-1] >= config['total_steps'] > steps[-2]
    assert [record['update'] for record in metrics] == list(range(1, len(metrics) + 1))
    assert len(receipts) == len(metrics)


def test_a_workdir_of_a_seed_is_that_of_a_run(three):
  folder, by_seed = three
  for seed, (metrics, _) in zip((1, 2, 3), by_seed, strict=True):
    workdir = folder / f'seed{seed}'
    assert Workdir(workdir).shown_config()['seed'] == seed
    assert checkpoints.newest_whole(workdir) == metrics[-1]['update']
    headers = [line for line in journal.read_lines(workdir / journal.RECEIPTS)
               if 'segment' in line]
    assert [header['num_seeds'] for header in headers] == [3] * len(headers)
    assert all(header['placement']['learner_devices'] == [0] for header in headers)
    assert [header['first_update'] for header in headers] == [1]


def with_a_replay(config, **fields):
  """Returns the config with nested fields replaced; if it has a replay, this is small."""
  if 'replay' in config:
    config['num_minibatches'] = 1
    config['replay'] |= dict(capacity=512, min_size=64, batch_size=32, gradient_steps=2)
  return changed(config, **fields)


def check_a_stop(config, folder, whole):
  """Checks that seeds which are stopped after update 3 end with the receipts that `whole` has."""
  finished, begun = train(config, folder, len(whole), StopAfter(folder / f'seed{len(whole)}'))
  assert not finished and [len(metrics) for metrics, _ in begun] == [3] * len(whole)
  finished, rest = train(config, folder, len(whole))
  assert finished
  assert [receipts for _, receipts in rest] == [receipts for _, receipts in whole]


@pytest.mark.parametrize('loss, fields', essential([
    ('ppo', {}), ('impala', {}), ('dqn', {}), ('dqn', dict(checkpoint__replay=False)),
    ('dpg', PUSH), ('r2d2', SEQUENCES), ('pqn', {}), ('sac', PUSH), ('td3', PUSH),
    ('examples.vmpo:VMPO', {}),
    ('examples.ppg:PPG', dict(network__separate_critic=True, loss__policy_updates=2)),
    ('examples.rnd:RND', dict(loss__embedding=5))], 'ppo'))
def test_seeds_that_were_stopped_go_on_to_the_same_bits(tmp_path, three, loss, fields):
  config = with_a_replay(config_of(loss), **fields)
  if loss == 'ppo':
    _, whole = three
  else:
    _, whole = train(config, tmp_path / 'whole', 2)
  check_a_stop(config, tmp_path / 'cut', whole)


@pytest.mark.parametrize('loss, fields', essential([
    ('dqn', {}), ('ppo', dict(env__choices=(3, 4), env__form='tuple')), ('pqn', {}),
    ('r2d2', SEQUENCES)], 'dqn'))
def test_seeds_that_are_stopped_and_go_on_take_legal_actions(loss, fields, tmp_path):
  """An illegal action would end an episode early."""
  config = config_of(loss, env={'task': 'tests.envs.masked:Doors', 'num_envs': 8})
  config = with_a_replay(config, **fields)
  _, whole = train(config, tmp_path / 'whole', 2)
  for metrics, _ in whole:
    assert metrics[-1]['episodes'] > 50
    assert {line['episode_length'] for line in metrics} == {LIMIT}
  check_a_stop(config, tmp_path / 'cut', whole)


@pytest.mark.parametrize('num_seeds, eviction', essential(
    [(None, 'fifo'), (None, 'prioritised'), (2, 'fifo'), (2, 'prioritised')], (None, 'fifo')))
def test_an_emptied_replay_gets_no_transitions_of_rows_before(num_seeds, eviction, tmp_path,
                                                              monkeypatch):
  """Environments that go on have rows of which the new replay has nothing."""
  config = config_of('dqn', num_minibatches=1, checkpoint__replay=False, loss__n_step=3)
  config['replay'] |= dict(capacity=512, min_size=512, batch_size=32, gradient_steps=2,
                           eviction=eviction)
  if num_seeds:
    train(config, tmp_path, num_seeds)
    resumed = changed(config, total_steps=464 + 192)
    folders = [tmp_path / f'seed{1 + i}' for i in range(num_seeds)]
    firsts = {folder: [1, len(lines_of(folder)[0]) + 1] for folder in folders}
    train(resumed, tmp_path, num_seeds, options=make_request(extend=True))
  else:
    one = prepared(config)
    open_workdir(tmp_path, one.experiment.fields)
    for stop in (3, 6, 8):
      train_in(one, tmp_path, [StopAt(stop)])
    firsts = {tmp_path: [1, 4, 7]}
  for folder, updates in firsts.items():
    records, _ = lines_of(folder)
    assert len(records) > updates[-1]
    for update in updates:
      record = records[update - 1]
      # The transitions of the last 3 of 8 rows of 8 environments are not complete yet.
      assert 0 < record['replay_size'] <= 5 * 8, record['update']


def test_more_seeds_join_and_finished_ones_stay(tmp_path, three):
  folder, whole = three
  for seed in ('seed1', 'seed2'):
    shutil.copytree(folder / seed, tmp_path / seed)
  finished, by_seed = train(config_of(), tmp_path, 3)
  assert finished
  assert by_seed[:2] == whole[:2]
  # The third seed, which began alone, has the bits that it had among others.
  assert by_seed[2][1] == whole[2][1]


@pytest.mark.full
def test_a_workdir_of_another_experiment_is_refused(tmp_path, three):
  for seed in ('seed1', 'seed2'):
    shutil.copytree(three[0] / seed, tmp_path / seed)
  config = config_of(total_steps=three[1][0][0][-1]['steps'] + 70)
  with pytest.raises(ValueError, match='total_steps'):
    train(config, tmp_path, 2)
  finished, by_seed = train(config, tmp_path, 2, options=make_request(extend=True))
  assert finished and all(metrics[-1]['steps'] >= config['total_steps'] for metrics, _ in by_seed)


def test_a_seed_that_is_refused_leaves_the_others_as_they_were(tmp_path, three):
  folder, whole = three
  for seed in ('seed1', 'seed2'):
    shutil.copytree(folder / seed, tmp_path / seed)
  of_seed_2 = whole[1][0][-1]['steps'] + 130
  with trainer.opened(resolve(config_of(seed=2, total_steps=of_seed_2)), tmp_path / 'seed2',
                      make_request(extend=True)) as opened:
    assert opened.train(stopping.Stopping(), quiet=True)
  before = (tmp_path / 'seed1' / record.NAME).read_bytes()
  with pytest.raises(ValueError, match='seed2 holds another .*total_steps: .*it can only grow'):
    train(config_of(total_steps=of_seed_2 - 1), tmp_path, 2, options=make_request(extend=True))
  assert (tmp_path / 'seed1' / record.NAME).read_bytes() == before


def test_seeds_need_another_folder_than_a_run(tmp_path, three):
  with pytest.raises(ValueError, match='seed1 is the workdir of one run; with --num_seeds each'):
    train(config_of(), three[0] / 'seed1', 2)


@pytest.mark.parametrize('chosen, devices', [
    (('actor_devices', 'learner_devices'), (0,)), ((), (0, 1))])
def test_seeds_have_one_device_unless_the_config_sets_several(chosen, devices):
  # As on a machine whose rule chooses several.
  experiment = resolve(config_of())
  place = dataclasses.replace(experiment.placement, actor_devices=(0, 1), learner_devices=(0, 1),
                              chosen=chosen)
  place = seeds.on_one_device(dataclasses.replace(experiment, placement=place)).placement
  assert place.actor_devices == place.learner_devices == devices


@pytest.mark.parametrize('field', ['actor_devices', 'learner_devices'])
def test_seeds_are_on_the_device_that_the_config_sets(field):
  config = config_of()
  config['placement'] = experiment.config('ppo', 'mlp', 'adam', scheme='fused').placement.to_dict()
  config['placement'][field] = (1,)
  place = seeds.on_one_device(resolve(config)).placement
  assert place.actor_devices == place.learner_devices == (1,)


def test_a_call_has_no_more_updates_than_a_segment():
  run = fresh(config_of(env__renew_every_updates=3, placement__updates_per_call=1_000_000))
  program = seeds.SeedsProgram([run, run], [build.Snapshot(initial_state(run))] * 2)
  assert program._updates_per_call == 3  # noqa: SLF001
  program.close()


@pytest.mark.parametrize('num_seeds, fields, message', [
    (0, {}, '--num_seeds: must be from 1 to 4096, got 0'),
    (2, dict(seed=2**31 - 1), '--num_seeds: the last seed would be 2147483648'),
    (2, dict(scheme='sync'), 'wants a scheme that is one program, scheme = fused; got sync'),
    (2, dict(env={'task': 'CartPole-v1', 'num_envs': 8}),
     'wants environments that are JAX functions; CartPole-v1 is none'),
    (2, dict(placement__actor_devices=(0, 1), placement__learner_devices=(0, 1)),
     'wants one device'),
    (2, dict(eval__every_updates=2), 'eval.every_updates: must be 0 with --num_seeds')])
def test_other_experiments_are_refused_before_anything_is_written(
    tmp_path, num_seeds, fields, message):
  with pytest.raises(ValueError, match=message):
    train(config_of(**fields), tmp_path / 'new', num_seeds)
  assert not (tmp_path / 'new').exists()


@pytest.mark.full
def test_the_open_files_of_a_seed_are_counted(tmp_path, monkeypatch):
  save = checkpoints.Checkpoints.save

  def most_open(num_seeds):
    counts = []

    def count_and_save(*args):
      counts.append(len(os.listdir('/proc/self/fd')))
      save(*args)

    monkeypatch.setattr(checkpoints.Checkpoints, 'save', count_and_save)
    train(config_of(total_steps=64, log__tensorboard=True), tmp_path / str(num_seeds), num_seeds)
    return max(counts)

  assert most_open(3) - most_open(1) == 2 * (seeds.FILES_OF_SEED + seeds.FILES_OF_EVENTS)


LIMITED = """
import resource, sys
limits = [int(sys.argv.pop()), int(sys.argv.pop())]
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
from podracer_jit.cli import train
code = train.main(sys.argv)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
sys.exit(code)
"""


@pytest.mark.parametrize('num_seeds, highest, code, output, error', [
    pytest.param(24, 1024, 0, '(244, 1024)', '', marks=pytest.mark.full),  # 100 + 24 * 6
    (300, 1024, 2, '(100, 1024)', 'podracer_jit: --num_seeds: 300 seeds need 1,900 open files, and '
     'this process may have 1,024 (ulimit -n); raise that limit, or train fewer at once\n')])
def test_the_limit_of_open_files_is_raised_or_the_run_refused(num_seeds, highest, code, output,
                                                               error, tmp_path):
  done = processes.run([
      sys.executable, '-P', '-c', LIMITED, '--config=ppo_cartpole:smoke',
      '--config.env.task=gymnax:Catch-bsuite', '--config.network.hidden=(16,)',
      '--config.placement.xla_threads=16', '--config.scheme=fused', '--config.total_steps=256',
      f'--num_seeds={num_seeds}', f'--workdir={tmp_path}/run', str(highest), '100'])
  assert (done.returncode, done.stderr) == (code, error)
  assert done.stdout.splitlines()[-1] == output
  assert (tmp_path / 'run').exists() == (code == 0)


def test_the_memory_of_all_seeds_is_added():
  one = prepared(config_of())
  assert memory.check(one) == []
  needed = sum(part.nbytes for part in memory.estimate(one))
  with pytest.raises(ValueError, match='the run needs at least'):
    memory.check(one, copies=2 * memory.host_memory() // needed)


def test_a_seed_that_diverges_is_named(tmp_path):
  with pytest.raises(Diverged, match=r'seed 1, update \d+ .* not finite'):
    train(config_of(optimizer__learning_rate=1e38), tmp_path, 2)


PROGRAM = """
import podracer_jit as pj
config = pj.load_config('ppo_cartpole:smoke')
config.env.task = 'gymnax:Catch-bsuite'
config.network.hidden = (16,)
config.placement.xla_threads = 16
runs = pj.train(config, 'python', num_seeds=2, quiet=True)
print([(run.finished, run.workdir.name, run.agent.task) for run in runs])
"""


@pytest.mark.full
def test_the_command_and_python_do_the_same(tmp_path):
  flags = ['--config=ppo_cartpole:smoke', '--config.env.task=gymnax:Catch-bsuite',
           '--config.network.hidden=(16,)', '--config.placement.xla_threads=16',
           '--num_seeds=2', '--workdir=command']
  command = [sys.executable, '-m', 'podracer_jit']
  trained = processes.run([*command, *flags], cwd=tmp_path)
  assert trained.returncode == 0, trained.stderr
  assert '2 seeds, starting' in trained.stdout
  assert 'command has them all, seed1 to seed2' in trained.stdout
  python = processes.run([sys.executable, '-c', PROGRAM], cwd=tmp_path)
  assert python.stdout == ("[(True, 'seed1', 'gymnax:Catch-bsuite'), "
                           "(True, 'seed2', 'gymnax:Catch-bsuite')]\n"), python.stderr
  for seed in ('seed1', 'seed2'):
    assert lines_of(tmp_path / 'command' / seed)[1] == lines_of(tmp_path / 'python' / seed)[1]
  evaluated = processes.run([*command, 'evaluate', '--workdir=command/seed2', '--num_episodes=2'],
                            cwd=tmp_path)
  assert evaluated.returncode == 0, evaluated.stderr
  refused = processes.run([*command, *flags, '--num_processes=2'], cwd=tmp_path)
  assert refused.returncode == 2 and '--num_seeds: is for one process' in refused.stderr
