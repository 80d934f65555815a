"""Settings made before JAX starts: the folder of compiled programs."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from podracer_jit.runtime import host
from tests import processes
from tests.runs import QUICK

TRAIN = ['--config=configs/impala_catch.py:smoke', '--config.log.tensorboard=False']
# The cache then also keeps programs that compile quickly.
WITH_CACHE = """
import os, sys
import jax
from podracer_jit.run import main
os.environ['XDG_CACHE_HOME'] = {cache!r}
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
sys.argv[0] = 'podracer_jit'
main.run()
"""


def _train(workdir: pathlib.Path, cache: pathlib.Path):
  program = WITH_CACHE.format(cache=str(cache))
  done = processes.run([sys.executable, '-c', program, *TRAIN, f'--workdir={workdir}'])
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in (workdir / 'receipts.jsonl').read_text().splitlines()]


def test_programs_are_cached_unless_they_contain_pointers(tmp_path):
  cache = tmp_path / 'cache'
  first = _train(tmp_path / 'first', cache)
  (folder,) = (cache / 'podracer_jit').iterdir()
  cached = {path.name for path in folder.iterdir() if path.name.endswith('-cache')}
  assert any(name.startswith('jit_learner-') for name in cached)
  assert not any(name.startswith('jit_rollout-') for name in cached)
  assert _train(tmp_path / 'second', cache) == first
  assert {path.name for path in folder.iterdir() if path.name.endswith('-cache')} == cached


def test_jaxs_own_cache_folder_is_respected(tmp_path):
  env = QUICK | dict(XDG_CACHE_HOME=str(tmp_path / 'unused'), JAX_PLATFORMS='cpu',
                     JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
                     JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'told'))
  subprocess.run([sys.executable, '-m', 'podracer_jit', *TRAIN, f'--workdir={tmp_path / "run"}'],
                 env=env, check=True, capture_output=True, timeout=300)
  assert not (tmp_path / 'unused').exists() and any((tmp_path / 'told').iterdir())


@pytest.fixture
def no_cache(monkeypatch):
  """Has JAX without a cache folder, and without a folder that was told; they come back."""
  folder = jax.config.jax_compilation_cache_dir
  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  yield
  jax.config.update('jax_compilation_cache_dir', folder)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', seconds)


def test_a_user_without_a_home_has_no_cache(no_cache, tmp_path, monkeypatch):
  def no_home():
    raise RuntimeError('Could not determine home directory.')
  monkeypatch.setattr(pathlib.Path, 'home', no_home)
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir is None
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(pathlib.Path, 'home', lambda: tmp_path / 'file' / 'home')
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir is None


def test_nothing_is_written_to_a_home_that_is_read_only(no_cache, tmp_path, monkeypatch):
  monkeypatch.setattr(pathlib.Path, 'home', lambda: tmp_path)
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  host._keep_programs()
  assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path))
  assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf
