"""The Python API: real trainings, each in its own process."""

import json
import signal
import subprocess
import sys
import time

import pytest

import podracer_jit as pj
from podracer_jit.workdir import checkpoints, journal
from tests import processes
from tests.runs import QUICK
from tests.tiers import essential


@pytest.mark.parametrize('call, message', [
    (lambda config, path: pj.train(config, path, change='total_steps'),
     r"change: must be a list of fields, got 'total_steps'; write \['total_steps'\]"),
    (lambda config, path: pj.train(config, path, callbacks=print),
     'callbacks: must be a list of functions and sinks, got <built-in function print>'),
    (lambda config, path: pj.train(config, None), 'workdir: must be a path, got None'),
    (lambda config, path: pj.load(path, allow_modules='mine.py'),
     r"allow_modules: must be a list of modules or files, got 'mine.py'; write \['mine.py'\]"),
    (lambda config, path: pj.evaluate('runs/x'),
     r"agent: must be an Agent, such as pj.load\(workdir\) returns, got 'runs/x'")])
def test_arguments_of_another_kind_are_refused(call, message, tmp_path):
  with pytest.raises(pj.errors.Refused, match=f'^{message}$'):
    call(pj.load_config('ppo_cartpole:smoke'), tmp_path / 'x')
  assert not (tmp_path / 'x').exists()


# Several runs in one process, with different tasks, schemes and devices; writes results to a file.
PROGRAM = """
import json, logging, os, sys, warnings
import envpool  # it changes the environment
import numpy as np
import podracer_jit as pj

def state():
  absl = logging.getLogger('absl')
  return [dict(os.environ) | {'NPROC': None}, list(map(repr, warnings.filters)), absl.level,
          list(map(repr, [*absl.filters, *absl.handlers]))]

out = {}
_ = pj.train, pj.load  # imports them
state_before = state()
config = pj.load_config('ppo_cartpole:smoke')
config.checkpoint.every_updates = 2
config.placement.xla_threads = 16
records = []
run = pj.train(config, 'cartpole', callbacks=[records.append], quiet=True)
out['records'] = records
out['metrics'] = run.metrics
out['trained'] = [run.finished, run.update, run.steps, str(run.workdir)]
obs = np.array([[0, 0, .1, 0], [0, 0, -.1, 0]], np.float32)
out['actions'] = run.agent.act(obs, greedy=True)[0].tolist()
run.agent.save('agent')
out['saved'] = pj.load('agent').act(obs, greedy=True)[0].tolist()
out['checkpoint'] = [pj.load('cartpole', update=4).update, pj.load('cartpole').update]
out['evaluation'] = pj.evaluate(pj.load('agent'), 5, greedy=True).returns

config = pj.load_config('impala_catch:smoke')
config.num_shards = config.num_grad_shards = 2
config.placement.actor_devices = config.placement.learner_devices = (0, 1)
config.placement.xla_threads = 16
pj.choose(config, 'network', 'mlp')
config.network.hidden = (32,)
second = pj.train(config, 'catch', quiet=True)
out['catch'] = [second.finished, second.update]

# The life of a run.
config.total_steps = 8000
longer = pj.train(config, 'catch', extend=True, quiet=True)
out['extended'] = [longer.finished, longer.steps >= 8000]
config.seed = 9
tuned = pj.train(config, 'tuned', init_from='catch', quiet=True)
out['tuned'] = tuned.finished

errors = []
def refused(call, *args, **kwargs):
  try:
    call(*args, **kwargs)
  except ValueError as error:
    errors.append(str(error))
config.num_minibatches = 7
refused(pj.train, config, 'no')
refused(pj.train, 'nothing', 'no')
refused(pj.train, 'ppo_cartpole:smok', 'no')
good = pj.load_config('ppo_cartpole:smoke')
good.placement.xla_threads = 16
refused(pj.train, good, 'catch')
refused(pj.train, good, 'no', extend=True)
refused(pj.train, 'ppo_cartpole:smoke', 'no', init_partly=True)
refused(pj.train, 'ppo_cartpole:smoke', 'no', callbacks=[5])
refused(pj.train, 5, 'no')
refused(pj.train, 'ppo_cartpole:smoke', 'gs://bucket/no')
refused(pj.load, 'no')
refused(pj.load, 'cartpole', update=3)
refused(pj.load, 'agent', update=3)
refused(pj.evaluate, pj.load('agent'), 0)
refused(pj.choose, config, 'nets', 'mlp')
catch = pj.load('catch')
film = pj.evaluate(catch, 4, num_envs=2, seed=3, video='films/catch.gif')
out['film'] = [str(film.video), film.returns]
out['named'] = str(pj.evaluate(catch, 1, video='gif').video)
refused(pj.evaluate, catch, 1, video='film.avi')
refused(pj.evaluate, catch, 1, video=True)
out['errors'] = errors
out['changed'] = [name for name, before, after in zip(
    ('environment', 'warnings', 'level', 'filters'), state_before, state()) if before != after]
json.dump(out, open('out.json', 'w'))
"""


@pytest.fixture(scope='module')
def api_run(tmp_path_factory):
  """Runs PROGRAM; returns its folder and its results."""
  folder = tmp_path_factory.mktemp('api')
  done = processes.run([sys.executable, '-P', '-c', PROGRAM], cwd=folder)
  assert done.returncode == 0, done.stderr
  assert not done.stdout and not done.stderr
  return folder, json.loads((folder / 'out.json').read_text())


def binary(folder, *args):
  return processes.run(processes.command(*args), cwd=folder)


def receipts(workdir):
  return journal.read_receipts(workdir).by_update


def test_training_has_the_same_bits_as_the_command(api_run):
  folder, out = api_run
  for name, config, *args in (
      ('cartpole', 'ppo_cartpole', '--config.checkpoint.every_updates=2'),
      ('catch', 'impala_catch', '--config.num_shards=2', '--config.num_grad_shards=2',
       '--config.network.name=mlp', '--config.network.hidden=(32,)')):
    done = binary(folder, f'--config={config}:smoke', f'--workdir={name}-binary',
                  '--config.placement.xla_threads=16', *args)
    assert done.returncode == 0, done.stderr
    of_api = receipts(folder / name)  # may have more updates, since the run was extended
    of_command = receipts(folder / f'{name}-binary')
    assert of_command and {update: of_api[update] for update in of_command} == of_command
  assert out['trained'] == [True, 6, out['metrics'][-1]['steps'], 'cartpole']
  assert out['catch'][0] and out['extended'] == [True, True] and out['tuned']


def test_only_the_number_of_xlas_threads_stays_set_in_the_process(api_run):
  assert api_run[1]['changed'] == []


def test_callbacks_get_the_records_of_the_metrics(api_run):
  folder, out = api_run
  assert out['records'] == out['metrics'] == journal.read_lines(folder / 'cartpole/metrics.jsonl')
  assert [record['update'] for record in out['records']] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_has_the_video_of_the_command(api_run):
  folder, out = api_run
  done = binary(folder, 'evaluate', '--workdir=catch', '--num_episodes=4', '--num_envs=2',
                '--seed=3', '--video=gif')
  assert done.returncode == 0, done.stderr
  record = json.loads((folder / 'catch' / 'evaluation.json').read_text())
  assert out['film'] == ['films/catch.gif', record['returns']]
  assert (folder / 'films' / 'catch.gif').read_bytes() == (
      folder / 'catch' / 'video.gif').read_bytes()
  assert out['named'] == 'video.gif' and (folder / 'video.gif').stat().st_size > 1000


def test_the_agent_of_a_run_can_act_be_saved_and_be_evaluated(api_run):
  folder, out = api_run
  assert out['actions'] == out['saved'] and set(out['actions']) <= {0, 1}
  assert out['checkpoint'] == [4, 6]
  done = binary(folder, 'evaluate', '--workdir=cartpole', '--num_episodes=5', '--greedy')
  assert done.returncode == 0, done.stderr
  assert json.loads((folder / 'cartpole/evaluation.json').read_text())['returns'] == \
      out['evaluation']


def test_errors_are_one_line(api_run):
  folder, out = api_run
  expected = [
      'num_minibatches: ', '--config=nothing: there is no such file, and no shipped config',
      "--config: there is no argument 'smok'; known are smoke",
      'catch holds another experiment (', '--extend: there is no run in no to go on with',
      '--init_partly: is for --init_from',
      'callbacks: each must be a function, a Sink or a class of sinks, got 5',
      'config: must be a ConfigDict, a mapping or a name, got 5',
      'gs://bucket/no: is an address, not a path; mount the bucket or server',
      '--workdir: no does not exist', 'cartpole has no checkpoint of update 3; it has those of',
      'update: is for workdirs; agent is a saved agent', 'num_episodes: must be at least 1',
      'section: must be one of loss, network, optimizer, got',
      "video: must be mp4, gif, or a path that ends in .mp4 or .gif, got 'film.avi'",
      "video: must be mp4, gif, or a path that ends in .mp4 or .gif, got 'True'"]
  for message, error in zip(expected, out['errors'], strict=True):
    assert message in error and '\n' not in error, error
  assert not (folder / 'no').exists()


STOPS = """
import json
import podracer_jit as pj

config = pj.load_config('ppo_cartpole:smoke')
config.total_steps = 13_000
config.checkpoint.every_updates = 4
ends = []

class Watch(pj.Sink):
  def update(self, record, receipt):
    record.clear()  # the record is a copy

  def saved(self, at):
    ends.append([at.update, at.steps, str(at.workdir)])
    if len(ends) == 2:
      return pj.STOP

run = pj.train(config, 'run', callbacks=[Watch()], quiet=True)
first = [run.finished, run.update]

def enough(record):
  if record['update'] == 10:
    return pj.STOP

stopped = pj.train(config, 'run', callbacks=[enough], quiet=True)
second = [stopped.finished, stopped.update]
last = pj.train(config, 'run', quiet=True)
pj.train(config, 'never', quiet=True)

errors = []
def fails(record):
  if record['update'] == 6:
    return 1 / 0
for callback in (fails, lambda record: 5):
  try:
    pj.train(config, 'failing', callbacks=[callback], quiet=True)
  except pj.CallbackFailed as error:
    errors.append([str(error), type(error.__cause__).__name__])
resumed = pj.train(config, 'failing', quiet=True)
print(json.dumps(dict(first=first, second=second, ends=ends, last=[last.finished, last.update],
                      errors=errors, resumed=resumed.finished)))
"""


@pytest.mark.full
def test_callbacks_stop_and_fail_runs(tmp_path):
  done = processes.run([sys.executable, '-P', '-c', STOPS], cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  out = json.loads(done.stdout)
  assert out['first'] == [False, 8]
  assert [end[0] for end in out['ends']] == [4, 8]
  assert out['ends'][1][1:] == [receipt_steps(tmp_path / 'run', 8), 'run']
  assert not out['second'][0] and 10 <= out['second'][1] <= 12
  assert out['last'][0] and out['resumed']
  # A run that was stopped, or has failed, has the bits of one that was not.
  never = receipts(tmp_path / 'never')
  assert never == receipts(tmp_path / 'run') == receipts(tmp_path / 'failing')
  (error, cause), (wrong_result, no_cause) = out['errors']
  assert error.startswith('callback fails, update 6: ZeroDivisionError: division by zero; the '
                          'last good checkpoint is that of update 4, in failing')
  assert cause == 'ZeroDivisionError'
  assert 'returned 5; it must return nothing, or STOP' in wrong_result and no_cause == 'NoneType'


def receipt_steps(workdir, update):
  lines = journal.read_lines(workdir / journal.METRICS)
  return next(line['steps'] for line in lines if line['update'] == update)


ENDLESS = """
import sys
import podracer_jit as pj
config = pj.load_config('impala_catch:smoke')
config.total_steps = int(sys.argv[1])
config.optimizer.anneal = False
try:
  pj.train(config, 'run', extend=len(sys.argv) > 2)
except KeyboardInterrupt:
  print('interrupted')
  sys.exit(7)
"""


@pytest.mark.parametrize('number, code, message', essential([
    (signal.SIGINT, 7, 'interrupted'), (signal.SIGTERM, -signal.SIGTERM, '')], signal.SIGINT))
def test_a_signal_saves_and_then_has_its_usual_effect(number, code, message, tmp_path):
  """Python itself runs the program, with the signal handlers of a program in a terminal."""
  with subprocess.Popen([sys.executable, '-P', '-c', ENDLESS, '100000000'], cwd=tmp_path,
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUICK,
                        preexec_fn=processes.default_signals) as process:
    metrics = tmp_path / 'run' / journal.METRICS
    try:
      while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
      process.send_signal(number)
      out, errors = process.communicate(timeout=120)
    finally:
      process.kill()
  assert process.returncode == code, errors
  assert message in out and 'stopped at update' in out
  saved = checkpoints.newest_whole(tmp_path / 'run')
  assert saved == max(receipts(tmp_path / 'run'))


EARLY = """
import os, signal, sys
import podracer_jit as pj
from podracer_jit.workdir.workdir import OpenWorkdir
number, handler = int(sys.argv[1]), sys.argv[2]
begins = OpenWorkdir.begins
def interrupted(*args):
  os.kill(os.getpid(), number)
  return begins(*args)
OpenWorkdir.begins = interrupted  # this process has made and locked the workdir
if handler == 'own':
  signal.signal(number, lambda number, frame: print('handled', number))
try:
  print(pj.train('impala_catch:smoke', 'run', quiet=True).finished)
except KeyboardInterrupt:
  print('interrupted')
print(os.path.exists('run'))
"""


@pytest.mark.parametrize('number, handler, code, output', [
    (signal.SIGTERM, 'default', -signal.SIGTERM, ''),
    (signal.SIGHUP, 'own', 0, f'handled {int(signal.SIGHUP)}\nFalse\nFalse\n'),
    (signal.SIGINT, 'default', 0, 'interrupted\nFalse\n')])
def test_a_signal_before_training_has_its_usual_effect(number, handler, code, output, tmp_path):
  done = processes.run([sys.executable, '-P', '-c', EARLY, str(int(number)), handler], cwd=tmp_path)
  assert (done.returncode, done.stdout) == (code, output), done.stderr
  assert done.stderr == '' and not (tmp_path / 'run').exists()


def test_training_after_other_uses_of_jax_fails_with_advice(tmp_path):
  program = ("import os, podracer_jit as pj, jax.numpy as jnp\n"
             "os.environ['NPROC'] = '{0}'\n"
             "{1}\njnp.ones(3).block_until_ready()\n"
             "pj.train('ppo_cartpole:smoke', 'run', quiet=True)")
  # Only one thread is too few, since it rounds differently.
  for threads, line, code in (('1', '', 1), ('1', "pj.prepare('ppo_cartpole:smoke')", 0),
                              ('2', '', 0)):
    done = processes.run([sys.executable, '-P', '-c', program.format(threads, line)], cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert code == 0 or 'call podracer_jit.prepare(config) before anything' in done.stderr


def test_the_names_of_the_api_exist_and_are_imported_on_first_use():
  assert {'train', 'load', 'evaluate', 'Agent', 'Callback', 'STOP'} <= set(dir(pj))
  assert all(getattr(pj, name) is not None for name in pj.__all__)
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    _ = pj.trian
  done = subprocess.run([sys.executable, '-P', '-c', 'import sys, podracer_jit; '
                         'print([m for m in ("jax", "envpool", "flax") if m in sys.modules])'],
                        capture_output=True, text=True, timeout=60, check=True)
  assert done.stdout == '[]\n'
