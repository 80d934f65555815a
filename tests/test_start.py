"""Commands import only the modules that they need."""

import importlib
import subprocess
import sys
import threading
import types

import pytest

from podracer_jit.cli.main import main
from podracer_jit.experiment import build
from podracer_jit.late import loaded_late

# What takes a tenth of a second to import, or more, and what loads it.
HEAVY = {'distrax', 'envpool', 'envpool.atari.atari_envpool', 'envpool.mujoco.mujoco_gym_envpool',
         'flax', 'gymnasium', 'jax', 'matplotlib', 'optax', 'orbax.checkpoint', 'ray', 'rlax',
         'scipy', 'tensorboardX', 'tensorflow_probability'}
TELL = """
import sys
from podracer_jit.late import _LateModule
def tell():
  print('loaded', *(name for name, module in sys.modules.items()
                    if type(module) is not _LateModule))
"""
AT_FIRST_ROLLOUT = TELL + """
from podracer_jit.actor.rollout_program import RolloutProgram
load = RolloutProgram.load
def tell_and_load(self, *args, **kwargs):
  program = load(self, *args, **kwargs)
  tell()
  return program
RolloutProgram.load = tell_and_load
"""
RUN = "from podracer_jit.cli.main import main\nassert main(['podracer_jit', *{args}]) == 0\n"


def heavy(code):
  """Returns the names of HEAVY that a new process has loaded when it calls `tell` first."""
  # Not by `processes.run`, whose processes have imported everything.
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False,
                        timeout=300)
  assert done.returncode == 0, done.stderr
  line = next(line for line in done.stdout.splitlines() if line.startswith('loaded '))
  return HEAVY & set(line.split())


@pytest.mark.parametrize('args, allowed', [
    (['configs'], set()),
    (['--help'], {'flax', 'jax', 'optax'}),
    (['compare', '--help'], {'flax', 'jax', 'optax'}),
])
def test_a_command_imports_what_it_needs(args, allowed):
  assert heavy(TELL + RUN.format(args=args) + 'tell()') <= allowed


def test_a_training_imports_what_it_needs_until_its_first_rollout(tmp_path):
  args = ['--config=configs/impala_catch.py:smoke', f'--workdir={tmp_path / "run"}']
  assert heavy(AT_FIRST_ROLLOUT + RUN.format(args=args)) <= {
      'envpool', 'flax', 'gymnasium', 'jax', 'optax', 'tensorboardX'}


@pytest.fixture
def package(tmp_path, monkeypatch):
  """Writes a package whose import leaves a trace; returns its name."""
  folder = tmp_path / 'late_package'
  folder.mkdir()
  (folder / '__init__.py').write_text(
      'import sys\nsys.late_imports.append(__name__)\nfrom late_package import sub\nvalue = 7\n')
  (folder / 'sub.py').write_text('name = __name__\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'late_imports', [], raising=False)
  yield 'late_package'
  for name in ('late_package', 'late_package.sub'):
    sys.modules.pop(name, None)


def imported_late(name):
  with loaded_late(lambda spec: spec.name == name):
    return importlib.import_module(name)


def test_a_late_module_is_executed_once_when_it_is_used(package):
  module = imported_late(package)
  sub = importlib.import_module(f'{package}.sub')
  assert not sys.late_imports
  assert module.value == 7 and module.sub is sub and type(module) is types.ModuleType
  assert module.value == 7 and sys.late_imports == [package]
  assert not hasattr(module, 'missing')


def test_two_threads_that_use_a_late_module_both_get_it(package):
  module = imported_late(package)
  barrier = threading.Barrier(8)
  values = []

  def use():
    barrier.wait()
    values.append(module.value)

  threads = [threading.Thread(target=use) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert values == [7] * 8 and sys.late_imports == [package]


def test_a_late_module_that_cannot_be_imported_says_so_at_each_use(package, tmp_path):
  (tmp_path / package / '__init__.py').write_text('import late_package_missing\n')
  module = imported_late(package)
  for _ in range(2):
    with pytest.raises(ImportError, match='late_package_missing'):
      module.value  # noqa: B018 - used for its error


def test_a_first_state_that_fails_ends_the_training(tmp_path, monkeypatch, capfd):
  def fail(run):
    raise RuntimeError('no first state')

  monkeypatch.setattr(build.Run, 'initial_state', fail)
  assert main(['podracer_jit', '--config=configs/impala_catch.py:smoke',
               f'--workdir={tmp_path / "run"}']) == 1
  errors = capfd.readouterr().err
  assert 'podracer_jit: RuntimeError: no first state; the last good checkpoint is none' in errors
