"""Users' code that exits, prints, trains or is edited while a run trains."""

import json
import signal
import sys
import time

import pytest

import podracer_jit as pj
from podracer_jit.experiment.resolve import resolve
from podracer_jit.workdir import journal
from tests import processes
from tests.cli.test_main import receipts

CALLBACKS = """
import json, sys, threading
import podracer_jit as pj
config = pj.load_config('ppo_cartpole:smoke')
config.checkpoint.every_updates = 2

def exits(record):
  if record['update'] == 3:
    sys.exit(5)

def interrupts(record):
  if record['update'] == 3:
    raise KeyboardInterrupt

def trains(record):
  if record['update'] == 3:
    print('a callback speaks')
    pj.train(config, 'inner', quiet=True)

ends = {}
for callback in (exits, interrupts, trains):
  try:
    end = pj.train(config, callback.__name__, callbacks=[callback], quiet=True).finished
  except BaseException as error:
    end = repr(error)
  ends[callback.__name__] = end, pj.train(config, callback.__name__, quiet=True).finished
thread = threading.Thread(target=pj.train, args=(config, 'thread'), kwargs=dict(quiet=True))
thread.start()
thread.join()
print(json.dumps(ends))
"""


@pytest.mark.full
def test_callbacks_that_exit_or_train_lose_nothing(tmp_path):
  done = processes.run([sys.executable, '-P', '-c', CALLBACKS], cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert not done.stderr
  spoken, ends = done.stdout.splitlines()
  assert spoken == 'a callback speaks'
  assert json.loads(ends) == {'exits': ['SystemExit(5)', True], 'trains': [True, True],
                              'interrupts': ['KeyboardInterrupt()', True]}
  names = ('exits', 'interrupts', 'trains', 'inner', 'thread')
  of_runs = [receipts(tmp_path / name) for name in names]
  assert len(of_runs[0]) == 6
  assert all(each == of_runs[0] for each in of_runs)


CONFIG = """
import sys
from podracer_jit.configs import ppo_cartpole

def get_config(arg=''):
  print('reading the table')
  if arg == 'exits':
    sys.exit(4)
  return ppo_cartpole.get_config(arg)
"""


@pytest.mark.parametrize('arg, code, text', [
    ('smoke', 0, 'finished at update 6'), ('exits', 2, '--config (own.py, line 8): SystemExit: 4')])
def test_a_config_may_print_and_one_that_exits_is_refused(arg, code, text, tmp_path):
  (tmp_path / 'own.py').write_text(CONFIG)
  done = processes.run(processes.command(f'--config=own.py:{arg}', '--workdir=run'), cwd=tmp_path)
  assert done.returncode == code, done.stderr
  assert 'reading the table' in done.stdout
  assert text in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert (tmp_path / 'run').exists() == (not code)


@pytest.mark.parametrize('where', ['network.name', 'env.task'])
def test_a_module_that_exits_is_refused(where, tmp_path, monkeypatch):
  """Its exit code would else be that of the command, and 3 means a saved run."""
  (tmp_path / 'leaves.py').write_text('import sys; sys.exit(3)\n')
  monkeypatch.syspath_prepend(tmp_path)
  part = 'gymnasium:leaves:Env' if where == 'env.task' else 'leaves:part'
  config = pj.load_config('ppo_cartpole:smoke')
  section, field = where.split('.')
  if field == 'name':
    message = r'network.name: leaves.py fails \(leaves.py, line 1\): SystemExit: 3'
    with pytest.raises(ValueError, match=message):
      pj.choose(config, section, part)
  else:
    config.env.task = part
    with pytest.raises(ValueError, match='SystemExit: 3'):
      resolve(config.to_dict())


ENV = """
import gymnasium, numpy as np

class Walk(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.steps = 0
    return self._observe(), {}

  def step(self, action):
    self.steps += 1
    return self._observe(), REWARD, self.steps == 7, False, {}

  def _observe(self):
    return self.np_random.uniform(-1, 1, 2).astype(np.float32)
"""


@pytest.mark.full
def test_a_module_edited_while_the_run_trains_does_not_change_the_run(tmp_path):
  """The run goes on with what it has imported, also in later segments; the next start says so."""
  module = tmp_path / 'walk.py'
  module.write_text(ENV.replace('REWARD', '1.0'))
  command = processes.command(
      '--config=ppo_cartpole', '--config.env.task=walk:Walk', '--config.env.num_envs=4',
      '--config.checkpoint.every_updates=3', '--config.total_steps=1_000_000', '--workdir=run')
  path = tmp_path / 'run' / journal.METRICS

  def train_until(updates, then=lambda: None, more=0):
    with processes.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as process:
      for count, function in ((updates, then), (updates + more, lambda: None)):
        while not (path.exists() and path.read_text().count('\n') >= count):
          assert process.poll() is None, process.communicate()
          time.sleep(0.05)
        function()
      process.send_signal(signal.SIGINT)
      _, errors = process.communicate()
    assert process.returncode == 3, errors
    return errors, journal.read_lines(path)

  errors, lines = train_until(
      4, then=lambda: module.write_text(ENV.replace('REWARD', '2.0')), more=9)
  assert 'source' not in errors
  assert {7.0, None} >= {line['episode_return'] for line in lines}
  errors, lines = train_until(len(lines) + 3)
  assert 'the source of walk.py has changed since' in errors
  assert lines[-1]['episode_return'] > 7.0
