"""A workdir that cannot be written to, as that of another user: reading works, writing is refused.

The test of `evaluate`, which prints its result, is in test_evaluation.py.
"""

import shutil
import tempfile
from pathlib import Path

import pytest

import podracer_jit as pj
from podracer_jit.cli import compare, export, train
from podracer_jit.runtime import host
from tests import processes
from tests.workdirs import make


@pytest.fixture
def workdir(monkeypatch):
  """Yields the workdir of a finished run, without a permission to write in it."""
  monkeypatch.setattr(host, 'prepare_host', lambda *args: None)
  monkeypatch.setattr(host, 'prepare_host_for_any', lambda *args: None)
  # Not in pytest's folder, into which other users cannot look.
  with tempfile.TemporaryDirectory() as name:
    workdir = Path(name) / 'run'
    shutil.copytree(make.FOLDER / 'v0_6_0' / 'recurrent', workdir)
    Path(name).chmod(0o777)
    paths = [workdir, *workdir.rglob('*')]
    for path in paths:
      path.chmod(0o555 if path.is_dir() else 0o444)
    # Other users cannot import from root's home, so everything is imported before.
    assert export.main(['podracer_jit export', f'--workdir={workdir}', f'--out={name}/first']) == 0
    before = {path: path.stat().st_mtime_ns for path in paths}
    with processes.as_a_user_that_is_not_root():
      yield workdir
    assert {path: path.stat().st_mtime_ns for path in [workdir, *workdir.rglob('*')]} == before
    for path in paths:
      path.chmod(0o755)


def test_it_is_compared_loaded_and_exported(workdir, capsys):
  assert compare.main(['podracer_jit compare', str(workdir), str(workdir)]) == 0
  assert 'identical' in capsys.readouterr().out
  agent = pj.load(workdir)
  assert agent.update > 0
  out = workdir.parent / 'out'
  assert export.main(['podracer_jit export', f'--workdir={workdir}', f'--out={out}']) == 0
  assert (out / 'manifest.json').is_file()


def test_training_in_it_is_refused_by_one_line(workdir, capsys):
  assert train.main(['podracer_jit', '--config=ppo_cartpole', f'--workdir={workdir}']) == 2
  lines = capsys.readouterr().err.strip().splitlines()
  assert lines == [f'podracer_jit: --workdir: {workdir} cannot be written to: Permission denied']
