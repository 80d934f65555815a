"""Virtual environments of the peers, with packages from PyPI."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

# EnvPool has the version of this command's, so that all step the same simulators.
_ENVPOOL = f'envpool=={importlib.metadata.version("envpool")}'
PACKAGES = {
    'torch': ['stable-baselines3', 'torch', 'gymnasium[mujoco]', 'ale-py',
              'opencv-python-headless', 'tyro', _ENVPOOL],
    'sbx': ['sbx-rl', 'gymnasium[mujoco]', _ENVPOOL],
    'rejax': ['rejax', 'gymnax<1'],  # rejax 0.1.3 expects five results of a step
    'cleanba': ['jax==0.5.3', 'jaxlib==0.5.3', 'flax==0.10.4', 'optax==0.1.7', 'rlax', 'tyro',
                'rich', 'gymnasium', _ENVPOOL],
}
# Versions that the table names.
NAMED = ('stable_baselines3', 'torch', 'sbx-rl', 'rejax', 'gymnax', 'jax', 'envpool', 'gymnasium',
         'ale-py', 'mujoco')


class CannotMake(RuntimeError):
  """A virtual environment could not be made."""


def python_of(folder: Path, name: str) -> str:
  """Returns the interpreter of a virtual environment, which is made if it is not complete.

  Args:
    folder: of all virtual environments.
    name: of PACKAGES.

  Raises:
    CannotMake: Python or pip failed; the message has the last line of their output.
  """
  python = folder / name / 'bin' / 'python'
  if not _versions_file(folder, name).exists():
    print(f'making {folder / name}: pip install {" ".join(PACKAGES[name])}', file=sys.stderr,
          flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, '-m', 'venv', str(folder / name)])
    _run([str(python), '-m', 'pip', 'install', '-q', *PACKAGES[name]])
    lines = _run([str(python), '-m', 'pip', 'freeze']).splitlines()
    _versions_file(folder, name).write_text(
        json.dumps(dict(line.split('==', 1) for line in lines if '==' in line), indent=2) + '\n')
  return str(python)


def versions(folder: Path, name: str) -> dict[str, str]:
  """Returns the versions of the packages that pip installed."""
  return json.loads(_versions_file(folder, name).read_text())


def _versions_file(folder: Path, name: str) -> Path:
  """Returns the file that is written when a virtual environment is complete."""
  return folder / name / 'versions.json'


def _run(command: list[str]) -> str:
  done = subprocess.run(command, check=False, text=True, capture_output=True)
  if done.returncode:
    lines = (done.stdout + done.stderr).strip().splitlines() or [f'exit code {done.returncode}']
    raise CannotMake(f'{" ".join(command[:4])}: {lines[-1]}')
  return done.stdout
