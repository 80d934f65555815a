"""Eight virtual CPU devices and a fixed thread pool, set before JAX starts its first backend."""

import gc
import os
import pathlib
import sys

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['NPROC'] = '16'  # the size of XLA's thread pool changes the bits of large reductions

import jax  # noqa: E402
import pytest  # noqa: E402

from podracer_jit import parts  # noqa: E402
from tests.flags import COMPILED_SOON  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)
# Collections visit all traced programs that are alive, which took 7% of the time of some tests.
gc.set_threshold(10_000, 20, 50)


def pytest_addoption(parser):
  parser.addoption('--compile-soon', action='store_true',
                   help='compile programs in less than half the time; they run longer')


def pytest_configure(config):
  if config.getoption('--compile-soon', False):
    os.environ['XLA_FLAGS'] = f'{COMPILED_SOON} {os.environ.get("XLA_FLAGS", "")}'
  config.addinivalue_line('filterwarnings', 'ignore:::gymnasium')
  # Tests share compiled programs, also with later runs of pytest, through a folder of the user's
  # (scripts/test --cold removes it). JAX's keys are the program, the flags, the version and the
  # CPU. Processes that tests start use a subfolder in place of the user's cache.
  if hasattr(config, 'workerinput'):
    folder = config.workerinput['compiled']
  else:
    home = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
    folder = config.compiled = str(home / 'podracer_jit-tests')
    os.makedirs(folder, mode=0o700, exist_ok=True)
  os.environ['XDG_CACHE_HOME'] = folder
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node):
  node.workerinput['compiled'] = node.config.compiled


@pytest.fixture(autouse=True)
def _folders_of_one_test(monkeypatch):
  """Keeps folders of users' modules that one test adds from the next test."""
  monkeypatch.setattr(parts, '_folders', list(parts._folders))
  monkeypatch.setattr(parts, '_files', list(parts._files))
  monkeypatch.setattr(sys, 'path', list(sys.path))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
  """Spares this process six collections at its end, which take seconds with JAX's objects."""
  gc.collect()
  gc.freeze()
