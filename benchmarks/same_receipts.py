"""Checks that two commits train to the same bits: the gate for a refactoring.

.venv/bin/python -m benchmarks.same_receipts --old=main~1 [--only=ppo] [--jobs=2] [--keep=DIR]

Runs short trainings with the code of the commit --old and with the working tree, and compares the
receipts of every update. The runs cover every scheme, loss, network, recurrent core, normaliser and
replay, action masks, an auxiliary head, microbatches, asynchronous actors, several devices, seeds
and processes, and runs of the old code that the new code resumes. In schemes that depend on timing
only the first update is compared, since it does not depend on timing.

--keep=DIR keeps the old commit's runs in DIR, so that a second call runs the new code only.
Exit code: 0 all are identical, 1 some differ or fail, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.trees import old_and_new

TWO_DEVICES = ('placement.actor_devices=(0,1)', 'placement.learner_devices=(0,1)',
               'num_shards=2', 'num_grad_shards=2')
RENEWAL = 'env.renew_every_updates'
RENEWAL_UNTIL_0_7 = 'checkpoint.every_updates'
SMALL_FRAMES = ('env.task=Pong-v5', 'env.img_height=42', 'env.img_width=42')


class Case(NamedTuple):
  """A training, by the flags of its command line."""

  name: str
  config: str  # a file of the tree, with its argument; without a folder, of configs/
  fields: Sequence[str] = ()  # overrides, without --config.
  only_first: bool = False  # later updates depend on timing
  processes: int = 1
  num_seeds: int = 0  # seeds of one vmapped program; 0: a run without --num_seeds


CASES = (
    Case('cleanba-impala-mlp', 'impala_catch.py:smoke'),
    Case('sync-impala-two-devices', 'impala_catch.py:smoke', ('scheme=sync', *TWO_DEVICES)),
    Case('fused-ppo-mlp', 'ppo_cartpole.py:smoke'),
    Case('ppo-vtrace', 'ppo_cartpole.py:smoke', ('scheme=ppo', 'loss.vtrace=True')),
    Case('dppo-two-devices', 'ppo_cartpole.py:smoke', ('scheme=dppo', *TWO_DEVICES)),
    Case('rapid-split-devices', 'impala_cartpole.py:smoke',
         ('scheme=rapid', 'placement.actor_devices=(0,1)', 'placement.learner_devices=(2,3)',
          'placement.xla_threads=4', 'num_shards=2', 'num_grad_shards=2')),
    Case('ddppo-two-devices', 'ppo_cartpole.py:smoke', ('scheme=ddppo', *TWO_DEVICES)),
    Case('dppo_async-one-worker', 'impala_cartpole.py:smoke', ('scheme=dppo_async',)),
    Case('rapid_async', 'impala_cartpole.py:smoke', ('scheme=rapid_async',), only_first=True),
    Case('impala-scheme', 'impala_catch.py:smoke', ('scheme=impala',), only_first=True),
    Case('all-moments', 'ppo_mujoco_fast.py:smoke', (
        'normalise.value=True', 'optimizer.kl_target=0.01', 'optimizer.anneal=False',
        'policy=tanh_gaussian')),
    Case('clip-value-scaled-gaussian', 'ppo_mujoco.py:smoke', (
        'env.task=Pendulum-v1', 'env.num_envs=4', 'unroll_length=64', 'num_minibatches=4',
        'policy=scaled_gaussian', 'scheme=sync')),
    Case('gru-fused', 'impala_memory.py:smoke'),
    Case('ppo-lstm', 'ppo_cartpole.py:smoke', (
        'network.core=lstm', 'network.core_size=16', 'scheme=sync', *TWO_DEVICES)),
    Case('resnet-84', 'impala_atari.py:smoke', ('env.task=Pong-v5',)),
    Case('nature-84', 'impala_atari.py:smoke,nature_cnn', ('env.task=Pong-v5', 'scheme=fused',
                                                           'num_shards=2')),
    Case('ppo-atari', 'ppo_atari.py:smoke', (
        *SMALL_FRAMES, 'scheme=cleanba', 'network.name=nature_cnn', 'network.hidden=64')),
    Case('pong-laptop', 'pong_laptop.py:smoke', ('total_steps=2000',)),
    Case('plain-reduce', 'impala_catch.py:smoke', ('exact_reduce=False', *TWO_DEVICES)),
    Case('dqn-lockstep', 'apex_dqn_catch.py:smoke'),
    Case('dqn-atari-two-devices', 'apex_dqn_pong_laptop.py:smoke'),
    Case('dpg-prioritised', 'apex_dpg_walker_walk.py:smoke', TWO_DEVICES),
    Case('dpg-fused', 'apex_dpg_cartpole_swingup.py:smoke', ('scheme=fused',)),
    Case('pqn', 'pqn_cartpole.py:smoke'),
    Case('sac', 'sac_pendulum.py:smoke'),
    Case('td3', 'td3_pendulum.py:smoke'),
    Case('r2d2', 'r2d2_memory.py:smoke'),
    Case('apex', 'apex_dqn_catch.py:smoke', ('scheme=apex',), only_first=True),
    Case('dqn-prioritised', 'apex_dqn_catch.py:smoke', (
        'replay.eviction=prioritised', 'replay.capacity=1000', 'replay.min_size=500',
        'total_steps=4000')),
    Case('pqn-gru', 'pqn_cartpole.py:smoke', ('network.core=gru', 'network.core_size=16')),
    Case('auxiliary-head', 'examples/transformer.py:smoke', (
        'network.name=mlp', 'env.task=CartPole-v1', 'scheme=sync')),
    # With most seeds, one of Cleaner's first observations allows no action.
    Case('masks-of-a-product', 'ppo_cartpole.py:smoke', ('env.task=Cleaner-v0', 'seed=9')),
    Case('dqn-masks', 'apex_dqn_catch.py:smoke', ('env.task=Game2048-v1',)),
    Case('microbatches-impala', 'impala_catch.py:smoke',
         ('scheme=sync', 'microbatch_rows=42', *TWO_DEVICES)),
    Case('microbatches-dpg', 'apex_dpg_cartpole_swingup.py:smoke', ('microbatch_rows=8',)),
    # A single thread steps environments in the order of their actions, so timing has no influence.
    Case('env-batch-one-thread', 'impala_catch.py:smoke',
         ('scheme=sync', 'env_batch=8', 'placement.env_threads=1')),
    Case('seeds', 'ppo_cartpole.py:smoke', ('env.task=gymnax:CartPole-v1',), num_seeds=2),
    Case('segments', 'impala_catch.py:smoke', (f'{RENEWAL}=3',)),
    Case('replay-segments', 'apex_dqn_catch.py:smoke', (f'{RENEWAL}=12',)),
    Case('replay-jax-envs-segments', 'apex_dqn_catch.py:smoke', (
        'env.task=gymnax:Catch-bsuite', 'scheme=fused', 'total_steps=4000',
        f'{RENEWAL}=12')),
    Case('two-processes', 'impala_catch.py:smoke', ('num_shards=2', 'num_grad_shards=2'),
         processes=2),
)
# In these cases the new code also repeats the last segment of the old code's run.
RESUMED = ('segments', 'replay-segments', 'replay-jax-envs-segments')


def command(case: Case, tree: Path, workdir: Path) -> list[str]:
  """Returns the command line of a training with the code of `tree`."""
  config = case.config if '/' in case.config else f'configs/{case.config}'
  flags = [f'--config={config}', f'--workdir={workdir}',
           *(f'--config.{field}' for field in case.fields)]
  if not (tree / 'podracer_jit' / 'schemes' / 'replaying.py').exists():
    flags = [flag.replace(RENEWAL, RENEWAL_UNTIL_0_7) for flag in flags]
  if case.num_seeds:
    flags.append(f'--num_seeds={case.num_seeds}')
  if case.processes == 1:
    return [sys.executable, '-m', 'podracer_jit', *flags]
  count = ['-n', str(case.processes), '--']
  script = tree / 'scripts' / 'launch_local.py'  # older commits have this script, not the command
  if script.exists():
    return [sys.executable, str(script), *count, *flags]
  return [sys.executable, '-m', 'podracer_jit', 'launch', *count, *flags]


def train(case: Case, tree: Path, workdir: Path) -> str:
  """Trains; returns the last line of the output if it failed, otherwise ''."""
  env = os.environ | {'PYTHONPATH': str(tree), 'JAX_PLATFORMS': 'cpu'}
  process = subprocess.run(command(case, tree, workdir), cwd=tree, env=env, text=True, check=False,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
  if process.returncode == 0:
    return ''
  lines = process.stdout.strip().splitlines() or ['no output']
  return lines[-1]


def receipts(workdir: Path) -> dict[tuple[int, str], tuple[str, str]]:
  """Returns the fingerprints of batch and parameters by update and folder (one for each seed)."""
  return {(line['update'], str(path.parent.relative_to(workdir))): (line['batch'], line['params'])
          for path in workdir.glob('**/receipts.jsonl')
          for line in map(json.loads, path.read_text().splitlines()) if 'update' in line}


def verdict(case: Case, old_workdir: Path, new_workdir: Path) -> tuple[bool, str]:
  """Compares two runs of a case; returns whether they are equal, and words for the report."""
  expected = receipts(old_workdir)
  actual = receipts(new_workdir)
  if case.only_first:
    first = (1, '.')
    return expected[first] == actual[first], 'first update'
  if expected.keys() != actual.keys():
    return False, f'{len(expected)} and {len(actual)} updates'
  different = [update for update in sorted(expected) if expected[update] != actual[update]]
  if different:
    return False, f'differ at update {different[0][0]} of {len(expected)}'
  return True, f'{len(expected)} updates'


def resume(case: Case, new_tree: Path, old_workdir: Path, workdir: Path) -> str:
  """Resumes a copy of the old run without its last checkpoint; returns as `train`.

  Args:
    case: the training.
    new_tree: the code that resumes.
    old_workdir: the finished run of the old code.
    workdir: a new folder for the copy.
  """
  shutil.copytree(old_workdir, workdir)
  checkpoints = sorted((workdir / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  shutil.rmtree(checkpoints[-1])
  return train(case, new_tree, workdir)


def compare(case: Case, trees: tuple[Path, Path], old_runs: Path, new_runs: Path) -> bool:
  """Runs a case with both codes and prints a line of the report.

  Args:
    case: the training.
    trees: folders with the old and the new code.
    old_runs: a folder for workdirs of the old code; a run that is in it is not repeated.
    new_runs: a folder for workdirs of the new code.

  Returns:
    Whether the receipts are identical.
  """
  old_tree, new_tree = trees
  start = time.monotonic()
  verdicts = []
  old_workdir = old_runs / case.name
  new_workdir = new_runs / case.name
  problem = ''
  if not receipts(old_workdir):
    problem = train(case, old_tree, old_workdir)
  problem = problem or train(case, new_tree, new_workdir)
  if not problem:
    verdicts.append(verdict(case, old_workdir, new_workdir))

  if not problem and case.name in RESUMED:
    resumed = new_runs / f'{case.name}-resumed'
    problem = resume(case, new_tree, old_workdir, resumed)
    if not problem:
      same, words = verdict(case, old_workdir, resumed)
      verdicts.append((same, f'resumed: {words}'))

  identical = not problem and all(same for same, _ in verdicts)
  words = problem or '; '.join(words for _, words in verdicts)
  print(f'{"identical" if identical else "DIFFERENT":9}  {case.name:28} {words}  '
        f'({time.monotonic() - start:.0f} s)', flush=True)
  return identical


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--old', required=True, help='the commit to compare with')
  parser.add_argument('--only', default='',
                      help='runs only cases whose name contains one of these, separated by commas')
  parser.add_argument('--jobs', type=int, default=2, help='trainings at a time')
  parser.add_argument('--keep', type=Path, help="a folder to keep the old commit's runs")
  args = parser.parse_args()
  cases = [case for case in CASES if any(part in case.name for part in args.only.split(','))]
  if not cases:
    print(f'--only: no case matches {args.only!r}; known are '
          f'{", ".join(case.name for case in CASES)}', file=sys.stderr)
    return 2
  with tempfile.TemporaryDirectory(prefix='same-receipts-') as temporary:
    folder = Path(temporary)
    old_runs = args.keep or folder / 'old'
    new_runs = folder / 'new'
    try:
      with old_and_new(args.old, folder) as trees, ThreadPoolExecutor(args.jobs) as pool:
        old_runs.mkdir(parents=True, exist_ok=True)
        new_runs.mkdir()
        identical = list(pool.map(lambda case: compare(case, trees, old_runs, new_runs), cases))
    except ValueError as error:
      print(error, file=sys.stderr)
      return 2
  print(f'{sum(identical)} of {len(identical)} identical')
  return 0 if all(identical) else 1


if __name__ == '__main__':
  sys.exit(main())
