"""Trains on large pictures that Python draws, again and again, and watches for a hang.

.venv/bin/python -m benchmarks.gymnasium_stress [--minutes=60] [--each=5]

The compiled rollouts of Gymnasium's environments call back to Python. A callback that waits for a
thread of XLA's pool can wait for ever, above all if the pool is small, arrays are large and several
actors call at once. So the trainings have a pool of two threads, pictures of 240 x 320 x 3, and one
to four actors in turn (--actors), each with `sync`, `cleanba` and `impala`. Each training is a
process, which gets SIGTERM after --each minutes, but not in its first minute of updates; --minutes
are those of all trainings together.

Prints a line for each training: its updates, the steps a second, and the longest time without an
update.

A training stands still if it makes no update for --patience_s and hardly ever has a thread that
wants a core, so a training that only waits for a busy machine does not. Its log then has the stacks
of all threads.

Exit code: 0 no problem; 1 a training stood still, failed, did not save and end after SIGTERM, or
left a process behind; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np

from benchmarks.soak import read_update

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (240, 320, 3)
NUM_ENVS, STEPS = 12, 16
SCHEMES = ('sync', 'cleanba', 'impala')
# Devices and actors of each for so many actors. A pool of two threads allows two devices.
PLACES = {1: ((0,), 1), 2: ((0, 1), 1), 3: ((0,), 3), 4: ((0, 1), 2)}
END_S = 300  # a training has so long to save and end after SIGTERM
LEAST_S = 60  # of updates in each training
WORKING = 0.2  # share of samples in which a training that works wants a core
STOPPED = (0, 3)  # exit codes of a training that a signal stopped


class Pictures(gymnasium.Env):
  """Shows a brightness, and rewards its half: the two actions are dark and bright."""

  observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, seed=None, options=None):
    """Draws the first picture."""
    super().reset(seed=seed)
    return self._observe(), {}

  def step(self, action):
    """Rewards the right half; an episode has twenty steps on average."""
    reward = float(action == self.brightness // 128)
    return self._observe(), reward, bool(self.np_random.random() < 0.05), False, {}

  def _observe(self):
    self.brightness = int(self.np_random.integers(256))
    return np.full(SHAPE, self.brightness, np.uint8)


def get_config():
  """Returns the config of the trainings; flags set the scheme and the placement."""
  from podracer_jit import experiment
  config = experiment.config('impala', 'nature_cnn', 'adam', scheme='sync')
  config.env.task = 'gymnasium_stress:Pictures'
  config.env.num_envs = NUM_ENVS
  config.unroll_length = STEPS
  config.network.channels = (4,)
  config.network.kernels = (8,)
  config.network.strides = (8,)
  config.network.hidden = 16
  config.total_steps = 2**30
  config.placement.xla_threads = 2
  config.placement.env_threads = 1
  config.env.renew_every_updates = 1000
  return config


class Outcome(NamedTuple):
  """Figures of a training, and what was wrong."""

  updates: int
  seconds: float  # from the first update to the signal
  longest_s: float  # the longest time without an update, after the first one
  problem: str  # '' if nothing was wrong


def command(scheme: str, actors: int, workdir: Path) -> list[str]:
  """Returns the command of a training."""
  devices, per_device = PLACES[actors]
  return [sys.executable, '-X', 'faulthandler', '-m', 'podracer_jit', f'--config={__file__}',
          f'--config.scheme={scheme}', f'--config.num_shards={actors}',
          f'--config.placement.actor_devices={devices}',
          f'--config.placement.actors_per_device={per_device}', f'--workdir={workdir}']


def descendants(pid: int) -> set[int]:
  """Returns the processes that a process has started, directly or by others."""
  parents = {}
  for entry in Path('/proc').iterdir():
    if entry.name.isdigit():
      try:
        # The name in parentheses may contain spaces; state and parent follow it.
        parents[int(entry.name)] = int((entry / 'stat').read_text().rpartition(')')[2].split()[1])
      except OSError:
        continue  # it has ended
  family = {pid}
  while True:
    more = {child for child, parent in parents.items() if parent in family} - family
    if not more:
      return family - {pid}
    family |= more


def wants_core(pid: int) -> bool:
  """Returns whether a thread of a process, or of its descendants, runs or could run."""
  for each in {pid, *descendants(pid)}:
    for thread in Path(f'/proc/{each}/task').glob('*/stat'):
      with contextlib.suppress(OSError):  # it has ended
        if thread.read_text().rpartition(')')[2].split()[0] in 'RD':
          return True
  return False


def watch(process: subprocess.Popen, workdir: Path, seconds: float, patience_s: float) -> Outcome:
  """Watches a training, and ends it.

  Args:
    process: the training.
    workdir: of the training.
    seconds: the training gets SIGTERM after so many seconds.
    patience_s: a training without an update or work for so long stands still.
  """
  start = time.monotonic()
  first = last = start
  update = 0
  longest_s = 0.0
  samples: list[bool] = []  # since the newest update: whether a thread wanted a core
  while time.monotonic() < max(start + seconds, first + LEAST_S) or not update:
    time.sleep(0.5)
    now = time.monotonic()
    if process.poll() is not None:
      return Outcome(update, now - first, longest_s, f'exit code {process.returncode}')
    newest = read_update(workdir / 'metrics.jsonl')
    if newest > update:
      if update:
        longest_s = max(longest_s, now - last)
      else:
        first = now
      update = newest
      last = now
      samples.clear()
      continue
    samples.append(wants_core(process.pid))
    if now - last > patience_s and sum(samples) < WORKING * len(samples):
      process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks of all threads
      process.wait()
      return Outcome(update, now - first, now - last, f'no update for {now - last:.0f} s, and '
                     f'work in {sum(samples)} of {len(samples)} samples')
  outcome = Outcome(update, time.monotonic() - first, longest_s, '')
  workers = descendants(process.pid)
  process.send_signal(signal.SIGTERM)
  try:
    code = process.wait(END_S)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGABRT)
    process.wait()
    return outcome._replace(problem=f'still runs {END_S} s after SIGTERM')
  if code not in STOPPED:
    return outcome._replace(problem=f'exit code {code} after SIGTERM')
  left_over = [pid for pid in workers if Path(f'/proc/{pid}').exists()]
  if not workers or left_over:
    return outcome._replace(problem=f'{len(workers)} processes of environments, of which '
                            f'{len(left_over)} were left over')
  return outcome


def train(scheme: str, actors: int, folder: Path, seconds: float, patience_s: float) -> Outcome:
  """Runs one training in a folder; see `watch`.

  Args:
    scheme: of the training.
    actors: number of them.
    folder: gets the workdir and the log.
    seconds: the training gets SIGTERM after so many seconds.
    patience_s: a training without an update for so long stands still.
  """
  workdir = folder / 'run'
  with (folder / 'log').open('w') as log:
    process = subprocess.Popen(command(scheme, actors, workdir), stdin=subprocess.DEVNULL,
                               stdout=log, stderr=subprocess.STDOUT,
                               env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)})
  try:
    return watch(process, workdir, seconds, patience_s)
  finally:
    process.kill()
    process.wait()


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--minutes', type=float, default=60.0, help='of all trainings together')
  parser.add_argument('--each', type=float, default=5.0, help='minutes of one training')
  parser.add_argument('--actors', default='1,2,3,4',
                      help='numbers of actors, from 1 to 4, separated by commas')
  parser.add_argument('--patience_s', type=float, default=120.0,
                      help='a training without an update or work for so long stands still')
  args = parser.parse_args(argv)
  names = args.actors.split(',')
  numbers = [number for number in PLACES if str(number) in names]
  if len(numbers) != len(names):
    parser.error(f'--actors: must be numbers from 1 to 4, got {args.actors}')
  # SIGTERM must unwind the stack, so that `finally` ends the training.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  folder = Path(tempfile.mkdtemp(prefix='gymnasium-stress-'))
  print(f'{"scheme":10}{"actors":>7}{"updates":>9}{"steps/s":>9}{"longest s":>11}', flush=True)
  combinations = itertools.cycle(itertools.product(numbers, SCHEMES))
  for actors, scheme in itertools.islice(combinations, max(1, round(args.minutes / args.each))):
    folder.mkdir(exist_ok=True)
    outcome = train(scheme, actors, folder, args.each * 60, args.patience_s)
    rate = outcome.updates * NUM_ENVS * STEPS / max(outcome.seconds, 1e-9)
    print(f'{scheme:10}{actors:7}{outcome.updates:9}{rate:9,.0f}{outcome.longest_s:11.1f}',
          flush=True)
    if outcome.problem:
      print(f'WRONG: {outcome.problem}; the log is {folder / "log"}')
      return 1
    shutil.rmtree(folder)
  print('no training stood still, failed or left a process behind')
  return 0


if __name__ == '__main__':
  sys.exit(main())
