"""Compares PPO on a Gymnasium task with Stable-Baselines3's PPO, in turn.

python3 -m venv sb3 && sb3/bin/pip install torch stable-baselines3
.venv/bin/python -m benchmarks.stable_baselines --sb3=sb3/bin/python [--task=CartPole-v1]

Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3) needs PyTorch, so it has a virtual
environment of its own. Both train PPO with the same sizes: environments, steps, epochs,
minibatches, and two networks of two layers of 64 units. Each measurement is a process; start-up,
compiling and the first update are not counted. Ours counts valid steps, which leave out the resets.
Exit code: 0; 1 if a measurement failed; 2 if there is no Stable-Baselines3.

A pair is one measurement of each, and the order alternates. The variants of Stable-Baselines3 are
its vector environments: in its own process (`dummy`) and in a process each (`subproc`). Prints
steps a second and the ratio, ours to the other: the median of the pairs, the lowest and the
highest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EPOCHS, MINIBATCHES = 4, 4
OURS = 'podracer_jit'


def measure_sb3(task: str, num_envs: int, num_steps: int, vector: str, seconds: float) -> float:
  """Trains with Stable-Baselines3, in the process of its virtual environment.

  Args:
    task: a registered task of Gymnasium.
    num_envs: number of environments.
    num_steps: steps of each environment in a rollout.
    vector: 'dummy' or 'subproc'.
    seconds: the measurement ends with the first update after so many seconds.

  Returns:
    Steps a second.
  """
  from stable_baselines3 import PPO
  from stable_baselines3.common.env_util import make_vec_env
  from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
  kind = {'dummy': DummyVecEnv, 'subproc': SubprocVecEnv}[vector]
  vec_env = make_vec_env(task, num_envs, seed=1, vec_env_cls=kind)
  rows = num_envs * num_steps
  model = PPO('MlpPolicy', vec_env, n_steps=num_steps, batch_size=rows // MINIBATCHES,
              n_epochs=EPOCHS, device='cpu', seed=1)
  model.learn(rows)
  updates = 0
  start = time.perf_counter()
  while time.perf_counter() - start < seconds:
    model.learn(rows, reset_num_timesteps=False)
    updates += 1
  rate = updates * rows / (time.perf_counter() - start)
  vec_env.close()
  return rate


def write_config(path: Path, task: str, num_envs: int, num_steps: int, scheme: str) -> None:
  """Writes the config of our side.

  Args:
    path: of the file.
    task: a registered task of Gymnasium.
    num_envs: number of environments.
    num_steps: steps of each environment in a rollout.
    scheme: the name of the scheme; it decides which sections there are.
  """
  from benchmarks import common
  from podracer_jit import experiment
  config = experiment.config('ppo', 'mlp', 'adam', scheme=scheme, unroll_length=num_steps,
                             num_epochs=EPOCHS, num_minibatches=MINIBATCHES)
  config.env.task = f'gymnasium:{task}'
  config.env.num_envs = num_envs
  config.network.separate_critic = True
  config.placement.xla_threads = 2
  common.write_config(path, config.to_dict())


def measure_ours(config: Path, scheme: str, seconds: float) -> float:
  """Returns the steps a second of a scheme, measured by `benchmarks.parts`."""
  figures = config.with_name('figures.json')
  _run([sys.executable, '-m', 'benchmarks.parts', f'--config={config}',
        f'--parts={scheme}', f'--seconds={seconds}', '--rounds_of=', f'--json={figures}'])
  return json.loads(figures.read_text())['parts'][scheme]['sps']


def _run(command: Sequence[str]) -> str:
  """Returns the output of a command.

  Raises:
    RuntimeError: it failed; the message has the last line of its output.
  """
  done = subprocess.run(command, cwd=ROOT, check=False, text=True, capture_output=True,
                        env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  if done.returncode:
    lines = (done.stdout + done.stderr).strip().splitlines() or [f'exit code {done.returncode}']
    raise RuntimeError(f'{command[0]}: {lines[-1]}')
  return done.stdout


def table(rates: dict[str, list[float]]) -> list[str]:
  """Returns a line for each variant; ours has no ratio.

  Args:
    rates: steps a second of each pair, by variant.
  """
  lines = []
  for name, each in rates.items():
    line = (f'{name:14}{statistics.median(each):10,.0f} steps/s ({min(each):,.0f} to '
            f'{max(each):,.0f})')
    if name != OURS:
      ratios = sorted(ours / other for ours, other in zip(rates[OURS], each, strict=True))
      line += (f'; ours to it {statistics.median(ratios):.2f} ({ratios[0]:.2f} to '
               f'{ratios[-1]:.2f})')
    lines.append(line)
  return lines


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--sb3', help='the Python that has stable-baselines3')
  parser.add_argument('--task', default='CartPole-v1', help='a registered task of Gymnasium')
  parser.add_argument('--num_envs', type=int, default=16)
  parser.add_argument('--num_steps', type=int, default=128, help='of each in a rollout')
  parser.add_argument('--scheme', default='sync', help='of ours')
  parser.add_argument('--vectors', default='dummy,subproc',
                      help='vector environments of Stable-Baselines3, separated by commas')
  parser.add_argument('--pairs', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=10.0, help='of a measurement')
  parser.add_argument('--measure', help='measures this vector environment here; for the script')
  args = parser.parse_args(argv)
  sizes = args.task, args.num_envs, args.num_steps
  if args.measure:
    print(json.dumps(measure_sb3(*sizes, args.measure, args.seconds)))
    return 0
  if not args.sb3:
    parser.error('--sb3: the Python that has stable-baselines3 is needed')
  try:
    _run([args.sb3, '-c', 'import stable_baselines3'])
  except (OSError, RuntimeError) as error:
    print(f'--sb3: {error}', file=sys.stderr)
    return 2
  child = [args.sb3, __file__, f'--task={args.task}', f'--num_envs={args.num_envs}',
           f'--num_steps={args.num_steps}', f'--seconds={args.seconds}']
  variants = [OURS, *args.vectors.split(',')]
  rates: dict[str, list[float]] = {name: [] for name in variants}
  with tempfile.TemporaryDirectory(prefix='stable-baselines-') as folder:
    config = Path(folder) / 'config.py'
    write_config(config, *sizes, args.scheme)
    for i in range(args.pairs):
      for name in variants if i % 2 == 0 else reversed(variants):
        try:
          if name == OURS:
            rate = measure_ours(config, args.scheme, args.seconds)
          else:
            rate = float(json.loads(_run([*child, f'--measure={name}'])))
        except RuntimeError as error:
          print(error, file=sys.stderr)
          return 1
        rates[name].append(rate)
  print(f'{args.task}, {args.num_envs} environments x {args.num_steps} steps, {args.pairs} pairs')
  print(*table(rates), sep='\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
