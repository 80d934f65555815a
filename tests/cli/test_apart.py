"""Runs of several processes whose optimizer is on one device of one of them: `dppo` and `rapid`."""

import os
import signal

import pytest

from tests import processes
from tests.cli.test_together import check_two_as_one, lines, train, verb, wait_for_updates
from tests.runs import TIMES
from tests.tiers import essential

PPO = ['--config=configs/ppo_cartpole.py:smoke', '--config.env.num_envs=8',
       '--config.unroll_length=16', '--config.num_shards=4', '--config.num_grad_shards=4',
       '--config.env.renew_every_updates=8', '--config.checkpoint.every_updates=12',
       '--config.log.tensorboard=False', '--config.total_steps=2500']
IMPALA = [PPO[0].replace('ppo', 'impala'), *PPO[1:]]
APART = ['--config.placement.actor_devices=(0,)', '--config.placement.learner_devices=(1,)']
# Devices of a process would wait in collectives of their own, if these began in any order.
TWO_EACH = ['--config.placement.actor_devices=(0,1)', '--config.placement.learner_devices=(0,1)']
NORMALISED = ['--config.normalise.obs=True', '--config.normalise.reward=True',
              '--config.optimizer.max_grad_norm=0.5']


def check(scheme, config, count, folder):
  """Checks the bits, that each update is written once, and the delays by hand; NAPPO, section 3."""
  workdir = check_two_as_one([*config, f'--config.scheme={scheme}'], folder, count)
  metrics, receipts = (lines(workdir / f'{name}.jsonl') for name in ('metrics', 'receipts'))
  updates = list(range(1, len(metrics) + 1))
  assert len(updates) > 16  # in three segments
  assert [line['update'] for line in metrics] == updates
  assert [line['update'] for line in receipts if 'update' in line] == updates
  steps = {PPO[0]: 4 * 4, IMPALA[0]: 2}[config[0]]
  lags = [0 if scheme != 'rapid' or update % 8 == 1 else 1 for update in updates]
  assert [line['cgd'] for line in metrics] == [lag * steps + (steps - 1) / 2 for lag in lags]
  assert {line['gud'] for line in metrics} == {0}
  of_one = lines(folder / 'one' / 'metrics.jsonl')
  for a, b in zip(metrics, of_one, strict=True):
    assert {name: a[name] for name in a if name not in TIMES} == {
        name: b[name] for name in b if name not in TIMES}


CASES = {
    'dppo, PPO': ('dppo', PPO, 2),
    'dppo, V-trace': ('dppo', [*PPO, '--config.loss.vtrace=True'], 2),
    'rapid, PPO': ('rapid', [*PPO, *APART], 2),
    'rapid, V-trace': ('rapid', [*PPO, *APART, '--config.loss.vtrace=True'], 2),
    'rapid, IMPALA': ('rapid', IMPALA, 2),
    'rapid, running moments': ('rapid', [*PPO, *NORMALISED], 2),
    'rapid, 4 processes': ('rapid', PPO, 4),
    'dppo, 2 devices each': ('dppo', [*PPO, *TWO_EACH], 2),
    'rapid, 2 devices each': ('rapid', [*PPO, *TWO_EACH], 2),
    'ddppo, PPO': ('ddppo', PPO, 2)}


@pytest.mark.parametrize('case', essential(CASES, 'dppo, 2 devices each', 'rapid, V-trace'))
@pytest.mark.same_bits('2 processes and 1, 4 and 1', 'PPO, with V-trace and without, IMPALA: MLP '
                       '(`dppo`, `rapid`, `ddppo`)')
def test_processes_that_share_gradients_make_the_same_bits_as_one(case, tmp_path):
  check(*CASES[case], tmp_path)


LONG = '--config.total_steps=25000'


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['dppo', 'rapid'])
@pytest.mark.same_bits('2 processes stopped by SIGTERM within a segment, resumed by 2 and by 1',
                       'PPO: MLP (`dppo`, `rapid`)')
def test_a_stopped_run_with_one_optimizer_goes_on_to_the_same_bits(scheme, tmp_path):
  experiment = [*PPO, LONG, f'--config.scheme={scheme}', '--config.env.renew_every_updates=0',
                '--config.checkpoint.every_updates=0']
  workdir = tmp_path / 'stopped'
  for victim in (1, 0):  # process 0 has the optimizer, and writes
    with processes.start_together(2, *experiment, f'--workdir={workdir}') as both:
      before = len(lines(workdir / 'metrics.jsonl')) if workdir.exists() else 0
      wait_for_updates(both[0], workdir, before + 3)
      both[victim].send_signal(signal.SIGTERM)
      outputs = [process.communicate(timeout=120)[0] for process in both]
      assert [process.returncode for process in both] == [3, 3], outputs
  assert train(workdir, experiment=experiment).returncode == 0
  assert train(tmp_path / 'never', experiment=experiment).returncode == 0
  assert 'identical: ' in verb('compare', tmp_path / 'never', workdir).stdout


@pytest.mark.parametrize('victim', essential([0, 1], 0))
def test_a_killed_process_ends_the_one_that_waits_for_its_gradients(victim, tmp_path):
  """The other waits in a collective: for the parameters, or for a gradient."""
  with processes.start_together(2, *PPO, LONG, f'--workdir={tmp_path}',
                                '--config.scheme=dppo') as both:
    wait_for_updates(both[0], tmp_path, 2)
    os.kill(both[victim].pid, signal.SIGKILL)
    out = both[1 - victim].communicate(timeout=60)[0]
    assert both[1 - victim].returncode not in (0, 3), out


@pytest.mark.full
@pytest.mark.parametrize('scheme', ['dppo_async', 'rapid_async', 'impala'])
def test_asynchronous_schemes_name_the_way_to_other_machines(scheme, tmp_path):
  results = processes.together(2, *PPO, f'--workdir={tmp_path}', f'--config.scheme={scheme}')
  assert any(f'scheme: {scheme} is for one process, not 2; sync, cleanba, ddppo, dppo, rapid, '
             f'apex_lockstep take several; actors of {scheme} on other machines are those of '
             'placement.cluster = ray, without --distributed' in result.stdout
             for result in results), results
  assert not (tmp_path / 'config.json').exists()
