"""Real sweeps: processes of members, failures, signals, and a cluster that is not real."""

import html
import importlib.metadata
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from podracer_jit.cli import sweep as verb
from podracer_jit.errors import Refused
from podracer_jit.report import reading
from podracer_jit.sweep import members, search, training
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.local import Local, Slot
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board
from podracer_jit.sweep.search import Range
from podracer_jit.sweep.slurm import Array
from podracer_jit.training.stopping import Stopping
from podracer_jit.workdir import checkpoints, journal
from tests import processes
from tests.processes import command
from tests.runs import QUICK
from tests.tiers import essential

SMOKE = ['--config=ppo_cartpole:smoke', '--config.total_steps=600',
         '--config.log.tensorboard=False']
RATE = '--grid=optimizer.learning_rate='


def run(out, *args, **kwargs):
  return processes.run(command('sweep', *SMOKE, f'--out={out}', *args), **kwargs)


def content(out):
  return json.loads((out / 'sweep.json').read_text())


def receipts(workdir):
  return (workdir / journal.RECEIPTS).read_text()


def test_a_sweep_grows_and_its_failures_wait_to_be_asked_for(tmp_path):
  good, bad = (f'ppo_cartpole_smoke,learning_rate={rate},seed=1' for rate in ('0.001', '1e+30'))
  done = run(tmp_path, f'{RATE}1e-3,1e30', '--jobs=2')
  assert done.returncode == 1, done.stderr
  assert f'{good}: finished, return' in done.stdout
  failed, hint = done.stderr.splitlines()
  assert failed.startswith(f'podracer_jit sweep: {bad} has failed: podracer_jit: ')
  assert hint.startswith('podracer_jit sweep: 1 of 2 members have failed; their output is in ')
  of_good, of_bad = content(tmp_path)['members']
  assert (of_good['finished'], of_good['error']) == (True, None)
  assert not of_bad['finished'] and 'not finite' in of_bad['error']
  assert of_good['command'] == ['podracer_jit', SMOKE[0], *SMOKE[1:],
                                '--config.optimizer.learning_rate=0.001', '--config.seed=1',
                                f'--workdir={tmp_path / good}']
  before = receipts(tmp_path / good)
  log = tmp_path / 'logs' / f'{bad}.log'
  size = log.stat().st_size

  # The same command trains nothing; a larger grid trains what is new.
  done = run(tmp_path, f'{RATE}1e-3,1e30,3e-4')
  assert done.returncode == 1
  assert done.stdout.count(': running') == 1
  assert 'learning_rate=0.0003,seed=1: finished' in done.stdout
  assert log.stat().st_size == size and receipts(tmp_path / good) == before

  done = run(tmp_path, f'{RATE}1e30', '--retry')
  assert done.returncode == 1 and f'{bad}: running' in done.stdout and log.stat().st_size > size
  assert len(content(tmp_path)['members']) == 3
  # All commands are noted, each once.
  first, second, third = content(tmp_path)['commands']
  assert first == ['podracer_jit', 'sweep', *SMOKE, f'--out={tmp_path}', f'{RATE}1e-3,1e30',
                   '--jobs=2']
  assert second[-1] == f'{RATE}1e-3,1e30,3e-4' and third[-1] == '--retry'


@pytest.mark.full
def test_a_member_alone_has_the_same_receipts(tmp_path):
  assert run(tmp_path / 'sweep', f'{RATE}1e-3', '--seeds=3').returncode == 0
  member, = content(tmp_path / 'sweep')['members']
  done = processes.run(command(*member['command'][1:-1], f'--workdir={tmp_path / "alone"}'))
  assert done.returncode == 0, done.stderr
  compared = processes.run(command('compare', tmp_path / 'sweep' / member['name'],
                                   tmp_path / 'alone'))
  assert compared.returncode == 0, compared.stdout
  # A report prints this command.
  done = processes.run(command('report', tmp_path / 'sweep', f'--out={tmp_path / "report"}'))
  assert done.returncode == 0, done.stderr
  page = html.unescape((tmp_path / 'report' / 'index.html').read_text())
  assert shlex.join(member['command']) in page


@pytest.mark.full
def test_a_sweep_that_was_killed_goes_on_at_once_to_the_same_receipts(tmp_path):
  flags = [SMOKE[0], *SMOKE[2:], '--config.total_steps=100000', '--seeds=1:2', '--jobs=2']
  names = [f'ppo_cartpole_smoke,seed={seed}' for seed in (1, 2)]
  with processes.Popen(command('sweep', *flags, f'--out={tmp_path / "killed"}'),
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
    while not all(updates(tmp_path / 'killed' / name) for name in names):
      assert process.poll() is None
      time.sleep(0.05)
    process.kill()
  # The members are saving; the command waits for them.
  for folder in ('killed', 'untouched'):
    done = processes.run(command('sweep', *flags, f'--out={tmp_path / folder}'))
    assert done.returncode == 0, done.stdout + done.stderr
  for name in names:
    compared = processes.run(command('compare', tmp_path / 'killed' / name,
                                     tmp_path / 'untouched' / name))
    assert compared.returncode == 0, compared.stdout


LONG = ['--config.total_steps=4000000', '--config.env.renew_every_updates=0',
        '--config.optimizer.anneal=False', '--seeds=1:2', '--jobs=2']


def updates(workdir):
  path = workdir / journal.METRICS
  return path.read_text().count('\n') if path.exists() else 0


@pytest.mark.parametrize('number', essential([signal.SIGTERM, signal.SIGINT, signal.SIGKILL],
                                             signal.SIGTERM))
def test_signals_stop_and_save_all_members(tmp_path, number):
  smoke = [arg for arg in SMOKE if 'total_steps' not in arg]
  workdirs = [tmp_path / f'ppo_cartpole_smoke,seed={seed}' for seed in (1, 2)]
  with processes.Popen(command('sweep', *smoke, *LONG, f'--out={tmp_path}'), text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
    while not all(updates(workdir) > 3 for workdir in workdirs):
      assert process.poll() is None, process.communicate()
      time.sleep(0.05)
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
  if number == signal.SIGKILL:  # the members hear of it by themselves
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not all(map(checkpoints.newest_whole, workdirs)):
      assert time.monotonic() < deadline
      time.sleep(0.05)
    return
  assert process.returncode == 3, errors
  assert out.count(': stopped') == 2
  saved = [checkpoints.newest_whole(workdir) for workdir in workdirs]
  assert saved == [updates(workdir) for workdir in workdirs]

  # The same command goes on with both.
  with processes.Popen(command('sweep', *smoke, *LONG, f'--out={tmp_path}'),
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
    while not all(updates(workdir) > number for workdir, number in
                  zip(workdirs, saved, strict=True)):
      assert process.poll() is None
      time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=120) == 3


@pytest.mark.full
def test_a_sweep_in_one_program_grows_by_a_seed(tmp_path):
  config = ['--config=pqn_cartpole:smoke', '--config.env.task=gymnax:CartPole-v1',
            f'--out={tmp_path}']
  done = processes.run(command('sweep', *config, '--seeds=1:2'))
  assert done.returncode == 0, done.stderr
  assert [member['num_seeds'] for member in content(tmp_path)['members']] == [2]
  done = processes.run(command('sweep', *config, '--seeds=1:3'))
  assert done.returncode == 0, done.stderr
  assert [(member['name'].rpartition(',')[2], member['num_seeds'], member['finished'])
          for member in content(tmp_path)['members']] == [
              ('seeds=1_2', 2, True), ('seed=3', None, True)]
  assert done.stdout.count(': running') == 1
  done = processes.run(command('sweep', *config, '--seeds=1:4', '--config.loss.discount=0.5'))
  assert done.returncode == 2 and 'is another experiment than that of the sweep' in done.stderr
  assert 'loss.discount: 0.98 in --out, 0.5 now' in done.stderr


def refused(capsys, *args):
  assert verb.main(['podracer_jit sweep', *args]) == 2
  line, = capsys.readouterr().err.splitlines()
  return line.removeprefix('podracer_jit sweep: ')


@pytest.mark.parametrize('args, message', [
    ([], '--config and --out are needed: podracer_jit sweep --config='),
    (['--config=ppo_cartpole'], '--config and --out are needed'),
    (['--seeds=0:x'], '--seeds: must be numbers and ranges'),
    (['--tasks=@mujoco'], '--tasks: there is no set @mujoco; there are @atari57'),
    (['--grid=loss.clip=uniform(0,1)'], '--grid: loss.clip has a range; add --search=tpe:32'),
    (['--prune=asha'], '--prune: is for --search'),
    (['--jobs=0'], '--jobs=0: 0 is not a positive integer'),
    (['--config.loss.clip'], '--config.loss.clip: has no value'),
    (['--search=grid:3'], '--search: must be tpe:N or random:N with a number of trials'),
    (['--search=tpe:3'], '--search: wants one --config, and a range or values in --grid'),
    (['--search=tpe:3', '--grid=loss.clip=uniform(1,0)'], '--grid: uniform(1,0) must have two'),
    (['--search=tpe:3', '--grid=loss.clip=log(0,1)'], '--grid: log(0,1) must have two numbers'),
    (['--search=tpe:3', '--prune=asha', '--seeds=1:2', '--grid=loss.clip=0.1,0.2'],
     '--prune: wants one seed and one task'),
    (['--ray', '--slurm='], '--slurm: cannot be combined with --ray'),
    (['--slurm=', '--search=tpe:3'], '--slurm: cannot be combined with --search'),
    (['extra'], 'extra: not a flag')])
def test_flags_that_are_refused_before_anything_is_checked(tmp_path, capsys, args, message):
  needed = [] if '--config=ppo_cartpole' in args or not args else [SMOKE[0],
                                                                   f'--out={tmp_path / "x" / "y"}']
  assert refused(capsys, *needed, *args).startswith(message)
  assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('args, message', [
    (['--tasks=CartPole-v1,Nope-v1'], 'ppo_cartpole_smoke,Nope-v1,seed=1: env.task: '),
    (['--config.scheme=sync', '--config.placement.actors_per_device=3'],
     'ppo_cartpole_smoke,seed=1: placement.actors_per_device: 3 actors'),
    pytest.param(['--grid=loss.clip=0.1,-1'], 'ppo_cartpole_smoke,clip=-1,seed=1: loss.clip: ',
                 marks=pytest.mark.full),
    pytest.param(['--grid=loss.clips=0.1'], 'ppo_cartpole_smoke,clips=0.1,seed=1: '
                 '--config.loss.clips: the config has no such field', marks=pytest.mark.full),
    pytest.param(['--search=tpe:3', '--grid=loss.clip=uniform(-1,1)'],
                 'ppo_cartpole_smoke,clip=-1.0,seed=1: loss.clip: ', marks=pytest.mark.full),
    pytest.param(['--search=tpe:3', '--grid=loss.clip=uniform(0.1,1)'],
                 '--search: ranks members by evaluations, and there are none',
                 marks=pytest.mark.full)])
def test_members_are_checked_before_the_first_begins(tmp_path, capsys, args, message):
  assert refused(capsys, SMOKE[0], f'--out={tmp_path / "x"}', *args).startswith(message)
  assert not (tmp_path / 'x').exists()


@pytest.mark.full
def test_a_sweep_is_of_one_experiment_and_one_version(tmp_path, capsys):
  assert run(tmp_path).returncode == 0
  again = [*SMOKE, f'--out={tmp_path}']
  assert refused(capsys, *again, '--config.loss.clip=0.3').startswith(
      '--config=ppo_cartpole:smoke: is another experiment than that of the sweep in --out '
      '(loss.clip: 0.2 in --out, 0.3 now)')
  assert verb.main(['podracer_jit sweep', *again, '--config.log.every_seconds=5']) == 0
  capsys.readouterr()
  path = tmp_path / 'sweep.json'
  path.write_text(path.read_text().replace(content(tmp_path)['version'], '0.1'))
  assert refused(capsys, *again).startswith(
      f'--out: the sweep in {tmp_path} is of podracer_jit 0.1')
  path.write_text('{}')
  assert refused(capsys, *again) == f'--out: {path} is not of a sweep'


def test_a_folder_that_is_none_of_a_sweep_is_refused(tmp_path, capsys):
  file = tmp_path / 'file'
  file.write_text('')
  for path in (file, file / 'x' / 'y'):
    for dry in ([], ['--dry']):
      assert refused(capsys, *SMOKE, f'--out={path}', *dry) == (
          f'--out: {file} is a file; name a folder')
  (tmp_path / 'config.json').write_text('{}')
  assert refused(capsys, *SMOKE, f'--out={tmp_path}') == (
      f'--out: {tmp_path} is the workdir of a run; name another folder')
  assert {path.name for path in tmp_path.iterdir()} == {'file', 'config.json'}


def test_dry_changes_nothing_and_leaves_out_what_has_ended(tmp_path, capsys):
  grid = ('loss.clip', [0.1, 0.2, 0.3])
  listed = members.product([SMOKE[0].partition('=')[2]], [], [1], [grid], SMOKE[1:])
  folder = Folder(tmp_path, importlib.metadata.version('podracer_jit'))
  folder.add(listed, {})
  folder.failed(listed[0], 'no')
  (tmp_path / 'slurm').mkdir()
  # SLURM has tried the second one, which has failed, too.
  (tmp_path / 'slurm' / f'{listed[1].name}.code').write_text('1\n')
  before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')}
  assert verb.main(['podracer_jit sweep', *SMOKE, f'--out={tmp_path}', '--slurm=', '--dry',
                    '--grid=loss.clip=0.1,0.2,0.3']) == 0
  line, = capsys.readouterr().out.splitlines()
  assert line.endswith(listed[2].name)
  assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob('*')} == before


@pytest.mark.parametrize('grid', ['placement.actor_devices=(0,),(0,1)',
                                  'placement.actor_platform=gpu'])
def test_members_may_have_devices_of_their_own(tmp_path, capsys, grid):
  args = ['--config=impala_catch:smoke', '--config.num_shards=2', '--config.num_grad_shards=2']
  assert verb.main(['podracer_jit sweep', *args, f'--out={tmp_path / "x"}', '--dry',
                    f'--grid={grid}']) == 0
  assert capsys.readouterr().out.count('--workdir=') == grid.count('(') or 1


def test_the_last_of_several_seeds_is_checked_too(tmp_path, capsys):
  assert refused(capsys, '--config=pqn_cartpole:smoke', '--config.env.task=gymnax:CartPole-v1',
                 f'--out={tmp_path / "x"}', '--seeds=2147483646:2147483648').endswith(
                     'seed: must be below 2^31, got 2147483648')


def test_dry_prints_commands_and_leaves_nothing(tmp_path, capsys):
  assert verb.main(['podracer_jit sweep', *SMOKE, f'--out={tmp_path / "x"}', '--dry',
                    '--grid=network.hidden=(8,8)']) == 0
  assert capsys.readouterr().out == (
      f'podracer_jit {" ".join(SMOKE)} \'--config.network.hidden=(8, 8)\' --config.seed=1 '
      f'--workdir={tmp_path}/x/ppo_cartpole_smoke,hidden=8_8,seed=1\n')
  assert not (tmp_path / 'x').exists()


def test_members_that_a_search_has_pruned_are_known_later(tmp_path, capsys):
  flags = [*SMOKE[1:], '--config.eval.every_updates=1']
  folder = Folder(tmp_path, importlib.metadata.version('podracer_jit'))
  plan = search.Search(
      folder, search.settings_of('random:2', 'asha', 1), {'loss.clip': Range('uniform', 0.1, 0.4)},
      lambda fields: members.product([SMOKE[0].partition('=')[2]], [], [1],
                                     [(name, [value]) for name, value in fields.items()], flags),
      {'loss.clip': 0.2})
  for value in (2, 1):
    member = plan.next()
    path = tmp_path / member.name / search.EVALUATIONS
    path.parent.mkdir()
    path.write_text(json.dumps({'mean': float(value), 'steps': 1}) + '\n')
    (path.parent / 'config.json').write_text('{"config": {}}')
    given_up = list(plan.given_up([member]))
    assert given_up == [member] * (value == 1)
    (folder.pruned if given_up else folder.finished)(member)
    plan.ended(member, is_finished=not given_up)
  assert [entry['pruned'] for entry in content(tmp_path)['members']] == [False, True]

  assert verb.main(['podracer_jit sweep', SMOKE[0], *flags, f'--out={tmp_path}',
                    '--search=random:2', '--prune=asha', '--grid=loss.clip=uniform(0.1,0.4)']) == 0
  out = capsys.readouterr().out
  assert f'{member.name}: pruned' in out and ': waiting' not in out and ': running' not in out
  assert '1 of 2 members have finished, and 1 were pruned: podracer_jit report' in out
  assert [run.state for run in reading.read([tmp_path]) if run.path.name == member.name] == [
      'pruned']


@pytest.mark.full
def test_a_search_of_tuples_with_several_seeds_goes_on(tmp_path):
  command_of = [f'--out={tmp_path}', '--seeds=1:2', '--config.eval.every_updates=1',
                '--config.eval.num_episodes=2', '--grid=network.hidden=(64,64),(8,8)']
  for trials, running in ((1, 2), (8, 2), (8, 0)):
    done = processes.run(command('sweep', *SMOKE, *command_of, f'--search=tpe:{trials}'))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(': running') == running and not done.stderr
  assert 'all 4 members have finished' in done.stdout
  assert {tuple(member['fields']['network.hidden']) for member in content(tmp_path)['members']} == {
      (64, 64), (8, 8)}


@pytest.mark.full
def test_a_sweep_itself_never_loads_jax():
  program = ('import sys; from podracer_jit.cli import sweep; '
             'assert not {"jax"} & set(sys.modules)')
  assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0


def test_a_full_disk_stops_all_members_in_one_line(tmp_path):
  # A quota of one file stands for a full disk: the kernel ends writes beyond it likewise.
  program = tmp_path / 'full.py'
  program.write_text(FULL)
  done = processes.run([sys.executable, '-P', '-c', FULL, str(tmp_path / 'out')])
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1]) == [1, ['begin a', 'begin b', 'stop all']]
  assert 'is full, so all members were stopped' in done.stdout


FULL = """
import json, pathlib, sys
from podracer_jit.sweep import training
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.local import log_of
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board
from podracer_jit.training.stopping import Stopping

out = pathlib.Path(sys.argv[1])
(out / 'logs').mkdir(parents=True)
members = [Member(name, 'x', {'seed': 1}) for name in 'abc']
events = []

class Jobs:
  def __init__(self):
    self.running = []
  has_room = property(lambda self: len(self.running) < 2)
  def begin(self, member):
    events.append(f'begin {member.name}')
    self.running.append(member)
  def ended(self):
    if len(self.running) == 2:
      log_of(out, members[0]).write_text('podracer_jit: [Errno 28] No space left on device: x')
      yield self.running.pop(0), 1
    elif 'stop all' in events:
      yield self.running.pop(0), 3
  def stop(self, member=None):
    events.append('stop all')
  def close(self, grace_s=0):
    pass

board = Board(out, {member.name: Size(1, 1, 1) for member in members})
code = training.train(Folder(out, '1'), training.Listed(members), Jobs(), Stopping(), board)
print(json.dumps([code, events]))
"""


def test_an_error_of_the_plan_has_all_members_save(tmp_path):
  class Plan(training.Listed):
    def next(self):
      if jobs.running:
        raise RuntimeError('garbled')
      return super().next()

  class Members:
    has_room = True

    def __init__(self):
      self.running = []
      self.calls = []

    def begin(self, member):
      self.running.append(member)

    def ended(self):
      return ()

    def stop(self, member=None):
      self.calls.append('stop')

    def close(self, grace_s=0):
      self.calls.append('close')

  jobs = Members()
  members = [Member(name, 'x', {'seed': 1}) for name in 'ab']
  with pytest.raises(RuntimeError, match='garbled'):
    training.train(Folder(tmp_path, '1'), Plan(members), jobs, Stopping(),
                   Board(tmp_path, {member.name: Size(1, 1, 1) for member in members}))
  assert jobs.calls == ['stop', 'close']


def test_a_check_ends_with_the_sweep_that_asked_for_it(tmp_path):
  program = ('import concurrent.futures, multiprocessing, os, sys, time\n'
             'from podracer_jit.runtime import children\n'
             'if __name__ == "__main__":\n'
             '  pool = concurrent.futures.ProcessPoolExecutor(\n'
             '    1, mp_context=multiprocessing.get_context("spawn"),\n'
             '    initializer=children.end_with_parent, initargs=(os.getpid(),))\n'
             '  print(pool.submit(os.getpid).result(), flush=True)\n'
             '  os._exit(130)\n')
  (tmp_path / 'checks.py').write_text(program)
  done = subprocess.run([sys.executable, tmp_path / 'checks.py'], capture_output=True, text=True,
                        timeout=120, env=QUICK | {'PYTHONPATH': os.pathsep.join(sys.path)},
                        check=False)
  assert done.returncode == 130, done.stderr
  child = int(done.stdout)
  until = time.monotonic() + 30
  while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
    assert time.monotonic() < until
    time.sleep(0.01)


def test_a_workdir_that_does_not_become_free_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(training, '_GRACE_S', 0.0)
  waiting = [Member(name, 'x', {'seed': 1}) for name in 'ab']
  (tmp_path / 'b').mkdir()
  program = ('import pathlib, sys; from podracer_jit.workdir import lock; '
             'lock.WorkdirLock(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()')
  with subprocess.Popen([sys.executable, '-c', program, tmp_path / 'b'], stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    with pytest.raises(ValueError, match='^--out: .*/b is in use by another process; stop it'):
      training.wait_until_saved(tmp_path, waiting)
  training.wait_until_saved(tmp_path, waiting)


def test_a_member_that_a_signal_ends_before_it_can_save_has_not_failed(tmp_path):
  (tmp_path / 'own.py').write_text('import os, signal\n'
                                   'signal.signal(signal.SIGTERM, signal.SIG_DFL)\n'
                                   'os.kill(os.getpid(), signal.SIGTERM)\n')
  member = Member('a', str(tmp_path / 'own.py'), {'seed': 1})
  folder = Folder(tmp_path, '1')
  folder.add([member], {})
  code = training.train(folder, training.Listed([member]), Local(tmp_path, [Slot(())]), Stopping(),
                        Board(tmp_path, {'a': Size(1, 1, 1)}))
  assert code == 3 and not folder.errors


SBATCH = """#!/bin/bash
# Runs all tasks of the array at once, as SLURM would.
script=${@: -1}
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
if grep -q 'cpus-per-task' "$script"; then export SLURM_CPUS_PER_TASK=1; fi
for (( i = 0; i <= last; i++ )); do
  SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$i bash "$script"
done
cp "$script" "$(dirname "$0")/submitted"
echo '7;cluster'
"""


SRUN = """#!/bin/bash
# If a file `preempts` exists, the member gets SIGTERM as soon as it has trained, as SLURM sends it.
if [ -z "${SRUN_CPUS_PER_TASK-1}" ]; then  # as versions 22.05 to 23.02
  echo 'srun: error: Invalid numeric value "" for --cpus-per-task.' >&2
  exit 1
fi
shift
[ -e "$(dirname "$0")/preempts" ] || exec "$@"
metrics=${*: -1}
metrics=${metrics#--workdir=}/metrics.jsonl
before=$(cat "$metrics" 2>/dev/null | wc -c)
"$@" &
until [ "$(cat "$metrics" 2>/dev/null | wc -c)" -gt "$before" ]; do
  kill -0 $! || exit 99
  sleep 0.1
done
kill -TERM $!
wait $!
"""
SQUEUE = """#!/bin/bash
cd "$(dirname "$0")"
if [ -e squeue_error ]; then cat squeue_error >&2; exit 1; fi
if [ -e queue ]; then cat queue; fi
"""


@pytest.fixture
def slurm(tmp_path):
  """Returns an environment with commands of SLURM that run everything at once."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  for name, text in (('sbatch', SBATCH), ('srun', SRUN), ('squeue', SQUEUE),
                     ('scontrol', '#!/bin/bash\necho "$@" >> "$(dirname "$0")/requeued"\n')):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
  return folder, QUICK | {'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}'}


@pytest.mark.full
def test_an_array_of_slurm(tmp_path, slurm):
  folder, env = slurm
  out = tmp_path / 'out'

  def submit(*args):
    return subprocess.run(command('sweep', *SMOKE, f'--out={out}', *args,
                                  '--slurm=--partition=cpu --cpus-per-task=1', '--jobs=1'),
                          env=env, capture_output=True, text=True, check=False)

  done = submit(f'{RATE}1e-3,1e30')
  assert done.returncode == 3, done.stderr
  assert 'submitted 2 as job 7' in done.stdout
  script = (folder / 'submitted').read_text()
  for line in ('--partition=cpu --cpus-per-task=1', '--array=0-1%1'):
    assert f'#SBATCH {line}\n' in script
  done = submit(f'{RATE}1e-3,1e30')
  assert done.returncode == 1 and '2 members, 1 finished, 0 under way' in done.stdout
  assert 'learning_rate=1e+30,seed=1 has failed: podracer_jit: ' in done.stderr
  # The second task is under way, as squeue says; a new member is submitted.
  (folder / 'queue').write_text('1\n')
  done = submit(f'{RATE}1e-3,1e30,3e-4', '--retry')
  assert done.returncode == 3 and '3 members, 1 finished, 1 under way' in done.stdout
  assert 'submitted 1 as job 7' in done.stdout


@pytest.mark.full
def test_a_member_that_slurm_preempts_saves_and_is_queued_again(tmp_path, slurm):
  folder, env = slurm
  out = tmp_path / 'out'
  (folder / 'preempts').touch()

  def submit():
    return subprocess.run(command('sweep', SMOKE[0], *SMOKE[2:], *LONG[:3], f'--out={out}',
                                  '--slurm='), env=env, capture_output=True, text=True, check=False)

  done = submit()
  assert done.returncode == 3 and 'submitted 1 as job 7' in done.stdout, done.stderr
  workdir = out / 'ppo_cartpole_smoke,seed=1'
  assert (folder / 'requeued').read_text() == 'requeue 7_0\n'
  saved = checkpoints.newest_whole(workdir)
  assert saved == updates(workdir) > 0
  (folder / 'queue').write_text('0\n')  # it waits again
  done = submit()
  assert done.returncode == 3 and '0 finished, 1 under way' in done.stdout
  assert 'submitted' not in done.stdout
  (folder / 'queue').unlink()  # SLURM has lost it
  done = submit()
  assert done.returncode == 3 and 'submitted 1 as job 7' in done.stdout
  assert (folder / 'requeued').read_text() == 'requeue 7_0\n' * 2
  assert not content(out)['members'][0]['error']


def test_a_member_that_was_stopped_has_not_failed(tmp_path):
  codes = {'saved': 3, 'interrupted': 130, 'terminated': 143, 'failed': 1, 'killed': 137}
  folder = Folder(tmp_path, '1')
  (tmp_path / 'slurm').mkdir()
  for name, code in codes.items():
    (tmp_path / 'slurm' / f'{name}.code').write_text(f'{code}\n')
  Array(folder, '').collect([Member(name, 'x', {'seed': 1}) for name in codes])
  assert folder.errors == {'failed': 'ended with exit code 1',
                           'killed': 'ended with exit code 137'}


def test_only_a_job_that_slurm_does_not_know_is_not_under_way(tmp_path, slurm, monkeypatch):
  folder, env = slurm
  monkeypatch.setenv('PATH', env['PATH'])
  array = Array(Folder(tmp_path, '1'), '')
  (tmp_path / 'slurm').mkdir()
  (tmp_path / 'slurm' / '7.names').write_text('a\nb')
  (folder / 'queue').write_text('1\n')
  assert array.under_way() == {'b'}
  (folder / 'squeue_error').write_text('slurm_load_jobs error: Invalid job id specified\n')
  assert array.under_way() == set()
  (folder / 'squeue_error').write_text('slurm_load_jobs error: Unable to contact slurm controller')
  with pytest.raises(Refused, match='^--slurm: squeue: slurm_load_jobs error: Unable to contact '
                     'slurm controller$'):
    array.under_way()


@pytest.mark.full
def test_slurm_is_needed_for_an_array(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path / 'empty'))
  assert refused(capsys, *SMOKE, f'--out={tmp_path}', '--slurm=') == (
      '--slurm: this machine has no sbatch')
  assert not (tmp_path / 'sweep.json').exists()  # nothing has begun


@pytest.mark.full
def test_a_sweep_that_cannot_begin_leaves_no_record(tmp_path, capsys, monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec',
                      lambda name, *args: None if name == 'ray' else find(name, *args))
  assert 'Ray is not installed' in refused(capsys, *SMOKE, f'--out={tmp_path}', '--ray')
  assert not (tmp_path / 'sweep.json').exists()
