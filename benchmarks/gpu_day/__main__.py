"""Measures what a first quarter of an hour on one GPU can tell, the most valuable figures first.

python -m benchmarks.gpu_day --out=OUT --budget=555
python -m benchmarks.gpu_day --out=OUT --budget=900 --dry  # on CPUs with small sizes, as a test

Each step is a process, or several at once, with a time limit. A step that does not fit into the
rest of the budget is skipped, so no step can cost the others their time. If the first step, probe,
fails, the rest would fail, too, and the script ends. The steps:

  probe      versions, the GPU, EnvPool's calls on it, costs of launches, branches and transfers
  smoke      four smoke runs: CPU actors, GPU actors, one program, convolutions
  bench_gpu  Pong, actors on the GPU: each part alone, then training, with 1, 2 and 4 actors
  anakin     environments that are JAX functions, in one program
  bits       the same bits? twice, other autotuning, deterministic flags, fused and sync, killed
  bench_cpu  Pong, actors on CPUs
  trace      a trace of the profiler, and the share of it in which the GPU is busy
  learners   ResNet and Nature CNN, one group, products in TF32
  bf16       layers of the Nature CNN in float32 and bfloat16
  pong_18    1.3 million steps of Pong; a return of 18 came after 1.1 million

OUT gets results.jsonl, which is written as it goes, smi.csv, logs.tar.gz and trace.tar.gz.

Exit code: 0; 1 if probe failed; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.processes import Command, Day

STEPS = ('probe', 'smoke', 'bench_gpu', 'anakin', 'bits', 'bench_cpu', 'trace', 'learners', 'bf16',
         'pong_18')
PONG = '--config.env.task=Pong-v5'
CPU_ACTORS = '--config.placement.actor_platform=cpu'
NOTHING_RESERVED = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}  # several trainings share the GPU
BY_TIME = '--config.numerics.deterministic=False'  # XLA chooses kernels by the time that they take
# XLA flags of trainings that run twice with repeatable kernels, each with an empty cache.
XLA_FLAGS = {'det': '', 'det_nt': '--xla_gpu_enable_triton_gemm=false'}
# Two trainings each, whose receipts are compared after the step `bits`.
PAIRS = {
    'twice, MLP': ('catch_gpu', 'catch_again'),
    'twice, CNN, one autotuning': ('pong', 'pong_again'),
    'twice, CNN, two autotunings': ('pong', 'pong_cold'),
    'fused and sync, MLP': ('cart_fused', 'cart_sync'),
    'fused and sync, CNN': ('pong_fused', 'pong_sync'),
    'cleanba and rapid, MLP': ('catch_gpu', 'catch_rapid'),
    'deterministic_ops, CNN': ('det_a', 'det_b'),
    'deterministic_ops without Triton, CNN': ('det_nt_a', 'det_nt_b'),
    'killed and resumed': ('life', 'life_killed'),
}
# Trainings that a dry day leaves out: CPUs lack the difference, or other trainings run their code.
NOT_DRY = {'catch_cpu', 'catch_again', 'pong_again', 'pong_cold', 'pong_sync', 'pong_fused',
           'det_a', 'det_b', 'det_nt_a', 'det_nt_b'}
KILLED_AFTER = 11  # updates, between the checkpoints of updates 8 and 16
MAX_LOG_BYTES = 4_000_000  # larger files are not packed
MAX_TRACE_BYTES = 15_000_000

# Commands.


def training(day: Day, name: str, config: str, *flags: str, cache: str = 'shared',
             xla_flags: str = '') -> Command:
  """Returns a training with a workdir of its own.

  Args:
    day: the folders.
    name: names the workdir.
    config: the value of --config.
    *flags: further flags.
    cache: name of the folder for compiled programs.
    xla_flags: the value of XLA_FLAGS; empty: as it is.
  """
  arguments = ['-m', 'podracer_jit', f'--config={config}', f'--workdir={day.work}/runs/{name}',
               *flags]
  variables = NOTHING_RESERVED | ({'XLA_FLAGS': xla_flags} if xla_flags else {})
  return Command(name, arguments, 100, cache, variables)


def measurement(day: Day, name: str, *arguments: str, limit_s: float) -> Command:
  """Returns a measurement of `measurements.py` in a process of its own.

  Args:
    day: whether it is dry, and the folders.
    name: of the log.
    *arguments: the kind of measurement and its arguments.
    limit_s: seconds after which it is ended.
  """
  dry = ['--dry'] if day.dry else []
  return Command(name, ['-m', 'benchmarks.gpu_day.measurements', *dry, f'--work={day.work}', '--',
                        *arguments], limit_s)


def run_trainings(day: Day, step: str, estimate_s: float, trainings: Sequence[Command]
                  ) -> dict[str, dict[str, Any]]:
  """Runs trainings at once, without those that a dry day leaves out; see `Day.run`."""
  return day.run(step, estimate_s, [command for command in trainings
                                    if not day.dry or command.name not in NOT_DRY])


def joined(runs: Sequence[Sequence[str]]) -> list[str]:
  """Returns the arguments of benchmarks that follow each other in one process, divided by +."""
  divided = itertools.chain.from_iterable(['+', *run] for run in runs)
  return list(divided)[1:]


# Receipts.


def receipts(day: Day, name: str) -> dict[int, tuple[str, str]]:
  """Returns the fingerprints of a training's batches and parameters by update."""
  return {line['update']: (line['batch'], line['params'])
          for line in _lines(day, name) if 'update' in line}


def canaries(day: Day, name: str) -> list[str]:
  """Returns the different canaries in the receipts of a training."""
  return sorted({line['canary'] for line in _lines(day, name) if 'canary' in line})


def _lines(day: Day, name: str) -> Iterator[dict[str, Any]]:
  path = day.work / 'runs' / name / 'receipts.jsonl'
  if path.exists():
    for line in path.read_text().splitlines():
      with contextlib.suppress(ValueError):  # the last line may be half written
        yield json.loads(line)


def compare(day: Day, what: str, name_a: str, name_b: str) -> None:
  """Notes the first update in which two trainings differ.

  Args:
    day: the folders.
    what: what differs between the two, in words.
    name_a: one training.
    name_b: the other training.
  """
  receipts_a = receipts(day, name_a)
  receipts_b = receipts(day, name_b)
  common = sorted(receipts_a.keys() & receipts_b.keys())
  first = next((update for update in common if receipts_a[update] != receipts_b[update]), None)
  part = None
  if first is not None:
    part = 'batch' if receipts_a[first][0] != receipts_b[first][0] else 'params'
  day.put(dict(step=f'same: {what}', ok=bool(common) and first is None, updates=len(common),
               first=first, part=part, canaries=[canaries(day, name_a), canaries(day, name_b)],
               a=name_a, b=name_b))


def kill_and_resume(day: Day, command: Command) -> None:
  """Kills a training after some updates, runs the same command again, and notes how long it took.

  Args:
    day: the folders and the budget.
    command: the training.
  """
  process = day.start(command)
  while not process.has_ended() and len(receipts(day, command.name)) < KILLED_AFTER:
    time.sleep(0.02)
  process.kill()
  killed_after = len(receipts(day, command.name))
  start = time.monotonic()
  process = day.start(command)
  seconds = None
  while not process.has_ended():
    if seconds is None and max(receipts(day, command.name), default=0) > killed_after:
      seconds = round(time.monotonic() - start, 2)
    time.sleep(0.05)
  day.put(process.result() | dict(killed_after=killed_after, first_new_update_after_s=seconds))


def watch_segments(day: Day, name: str, stop: threading.Event) -> None:
  """Notes the seconds between updates of a training: the gap between segments is their cost.

  Args:
    day: the folders.
    name: the training.
    stop: ends the watch.
  """
  written_at = {}
  while not stop.is_set():
    for update in receipts(day, name):
      written_at.setdefault(update, time.monotonic())
    time.sleep(0.02)
  gaps = {after: round(written_at[after] - written_at[before], 3)
          for before, after in itertools.pairwise(sorted(written_at))}
  day.put(dict(step=f'gaps of {name}', ok=None, seconds_between_updates=gaps))


# The steps.


class Flags:
  """Flags that several steps share; those of a dry day are small."""

  def __init__(self, dry: bool):
    """Sets them."""
    self.actors = CPU_ACTORS if dry else '--config.placement.actor_platform=gpu'
    small = [f'--config.env.img_{side}=21' for side in ('height', 'width')] if dry else []
    nature = ['channels=(8,16)', 'kernels=(4,3)', 'strides=(4,1)', 'hidden=32'] if dry else []
    resnet = ['channels=(8,)', 'hidden=32'] if dry else []
    self.pong = [PONG, *small, *(f'--config.network.{field}' for field in nature)]
    self.few_updates = [f'--config.total_steps={96 if dry else 480}']
    self.measured = ['--rounds_of=', *(['--seconds=0', '--rounds=1'] if dry else
                                       ['--seconds=4', '--rounds=2'])]
    self.nature = 'impala_atari:nature_cnn' + (',smoke' if dry else '')
    self.bench = [f'--config={self.nature}', *self.pong, *self.measured, '--config.num_shards=4']
    self.bench_resnet = ['--config=impala_atari' + (':smoke' if dry else ''), PONG, *small,
                         *(f'--config.network.{field}' for field in resnet), *self.measured,
                         '--parts=learner', self.actors]


def run_steps(day: Day) -> bool:
  """Runs the chosen steps in order; returns whether the machine can run them at all."""
  flags = Flags(day.dry)
  probe = day.run('probe', 0, [measurement(day, 'probe', 'probe', limit_s=100)])
  if day.wants('probe') and not probe.get('probe', {}).get('data'):
    return False
  run_smoke(day, flags)
  run_bench_gpu(day, flags)
  sizes = '64' if day.dry else '1024,16384,65536'  # 25 s each, most of it compilation
  day.run('anakin', 80, [measurement(day, 'anakin', 'anakin', sizes, limit_s=110)])
  run_bits(day, flags)
  run_bench_cpu(day, flags)
  run_trace(day, flags)
  run_learners(day, flags)
  day.run('bf16', 25, [measurement(day, 'bf16', 'bf16', limit_s=60)])
  run_pong(day, flags)
  return True


def run_smoke(day: Day, flags: Flags) -> None:
  """Runs four smoke runs at once."""
  pong = [*flags.pong, *flags.few_updates]
  run_trainings(day, 'smoke', 60, [
      training(day, 'catch_cpu', 'impala_catch:smoke', CPU_ACTORS),
      training(day, 'catch_gpu', 'impala_catch:smoke', flags.actors),
      training(day, 'cart_fused', 'ppo_cartpole:smoke'),
      training(day, 'pong', 'impala_atari:nature_cnn,smoke', *pong, BY_TIME)])


def with_more_actors(flags: Flags, platform: str, counts: Sequence[int]) -> list[list[str]]:
  """Returns the arguments of benchmarks of Pong, one for each number of actors a device."""
  return [[*flags.bench, platform, '--parts=rollout,cleanba',
           f'--config.placement.actors_per_device={count}'] for count in counts]


def run_bench_gpu(day: Day, flags: Flags) -> None:
  """Measures Pong with actors on the GPU."""
  parts = '--parts=environment,policy,rollout,learner,sync,cleanba'
  runs = [[*flags.bench, flags.actors, parts]]
  if not day.dry:
    runs += with_more_actors(flags, flags.actors, (2, 4))
  day.run('bench_gpu', 110, [measurement(day, 'bench_gpu', 'bench', *joined(runs), limit_s=190)])


def run_bench_cpu(day: Day, flags: Flags) -> None:
  """Measures Pong with actors on CPUs, whose programs are stored, and the learner on the GPU."""
  runs = with_more_actors(flags, CPU_ACTORS, (4,) if day.dry else (1, 4))
  day.run('bench_cpu', 60, [measurement(day, 'bench_cpu', 'bench', *joined(runs), limit_s=110)])


def run_bits(day: Day, flags: Flags) -> None:
  """Trains in pairs whose receipts should be equal, kills one training, and compares."""
  life_flags = ['--config.total_steps=13824', '--config.env.renew_every_updates=8',
                '--config.checkpoint.every_updates=8', flags.actors]
  smoke = 'impala_atari:nature_cnn,smoke'
  pong = [*flags.pong, *flags.few_updates]
  trainings = [
      training(day, 'life', 'impala_catch', *life_flags),
      training(day, 'catch_again', 'impala_catch:smoke', flags.actors),
      training(day, 'cart_sync', 'ppo_cartpole:smoke', '--config.scheme=sync'),
      training(day, 'catch_rapid', 'impala_catch:smoke', '--config.scheme=rapid', flags.actors),
      training(day, 'pong_again', smoke, *pong, BY_TIME),
      training(day, 'pong_cold', smoke, *pong, BY_TIME, cache='cold'),
      training(day, 'pong_sync', smoke, *pong, '--config.scheme=sync'),
      training(day, 'pong_fused', smoke, *pong, '--config.scheme=fused'),
      *(training(day, f'{name}_{run}', smoke, *pong, cache=f'{name}_{run}', xla_flags=xla_flags)
        for name, xla_flags in XLA_FLAGS.items() for run in 'ab')]

  estimate_s = 75
  stop = threading.Event()
  beside = []
  if day.wants('bits') and day.has_time(estimate_s):
    killed = training(day, 'life_killed', 'impala_catch', *life_flags)
    beside = [threading.Thread(target=kill_and_resume, args=(day, killed)),
              threading.Thread(target=watch_segments, args=(day, 'life', stop))]
  for thread in beside:
    thread.start()
  try:
    done = run_trainings(day, 'bits', estimate_s, trainings)
  finally:
    stop.set()
    for thread in beside:
      thread.join()
  for what, names in PAIRS.items():
    if done and all((day.work / 'runs' / name).exists() for name in names):
      compare(day, what, *names)


def run_trace(day: Day, flags: Flags) -> None:
  """Traces a few updates, and measures how busy the GPU was."""
  folder = day.work / 'trace'
  day.run('trace', 40, [training(
      day, 'traced', flags.nature, *flags.pong, flags.actors,
      f'--config.total_steps={192 if day.dry else 25600}',
      '--config.env.renew_every_updates=0', f'--profile_dir={folder}')])
  if folder.exists():
    day.run('trace', 0, [measurement(day, 'busy', 'busy', str(folder), limit_s=30)])


def run_learners(day: Day, flags: Flags) -> None:
  """Measures learners: ResNet as shipped and with one group, Nature CNN, products in TF32."""
  one_group = '--config.num_grad_shards=1'
  nature = [*flags.bench, flags.actors, '--parts=learner']
  runs = [flags.bench_resnet, [*nature, '--config.numerics.precision=default']]
  if not day.dry:
    runs[1:1] = [[*flags.bench_resnet, one_group], [*nature, one_group]]
  day.run('learners', 70, [measurement(day, 'learners', 'bench', *joined(runs), limit_s=140)])


def run_pong(day: Day, flags: Flags) -> None:
  """Trains to a return of 18; docs/gpu.md has the times of version 0.7."""
  training_of_pong = training(
      day, 'pong_18', 'pong_laptop' + (':smoke' if day.dry else ''), *flags.pong, flags.actors,
      '--config.scheme=cleanba', *([] if day.dry else ['--config.total_steps=1300000']))
  day.run('pong_18', 120, [training_of_pong._replace(limit_s=170)])


# The whole day.


@contextlib.contextmanager
def watched_gpu(path: Path) -> Iterator[None]:
  """Writes what nvidia-smi sees twice a second to a file."""
  query = '--query-gpu=timestamp,utilization.gpu,memory.used,power.draw,clocks.sm'
  command = ['nvidia-smi', query, '--format=csv,noheader,nounits', '-lms', '500']
  process = None
  with path.open('w') as file, contextlib.suppress(OSError):
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
  try:
    yield
  finally:
    if process:
      process.terminate()
      process.wait()


def pack(day: Day) -> None:
  """Packs logs, receipts and metrics, and the trace, without its largest files if it is large."""
  small = [path for pattern in ('logs/*', 'runs/*/*.jsonl', '*.json')
           for path in day.work.glob(pattern) if path.stat().st_size < MAX_LOG_BYTES]
  _pack(day, 'logs.tar.gz', small)
  traced = [path for path in (day.work / 'trace').rglob('*') if path.is_file()]
  if traced:
    packed = _pack(day, 'trace.tar.gz', traced)
    if packed.stat().st_size > MAX_TRACE_BYTES:
      _pack(day, 'trace.tar.gz', [path for path in traced if not path.name.endswith('.xplane.pb')])


def _pack(day: Day, name: str, paths: Sequence[Path]) -> Path:
  packed = day.out / name
  with tarfile.open(packed, 'w:gz') as archive:
    for path in paths:
      archive.add(path, str(path.relative_to(day.work)))
  return packed


def run_day(day: Day, steps: Callable[[Day], bool] = run_steps) -> int:
  """Runs steps and packs what they left; returns the exit code."""
  try:
    with watched_gpu(day.out / 'smi.csv'):
      can_run = steps(day)
  finally:
    pack(day)
    print(f'spent {day.seconds():.1f} s', flush=True)
  if not can_run:
    print('gpu_day: probe failed, so the rest would fail, too', file=sys.stderr)
  return 0 if can_run else 1


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu_day', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=Path, required=True, help='a folder for the results')
  parser.add_argument('--budget', type=float, default=555, help='seconds for everything')
  parser.add_argument('--dry', action='store_true', help='small sizes on CPUs, as a test')
  parser.add_argument('--only', default='', help='steps to run, by comma')
  args = parser.parse_args(argv)
  only = list(filter(None, args.only.split(',')))
  unknown = sorted(set(only) - set(STEPS))
  if unknown:
    parser.error(f'--only: there is no step {unknown[0]!r}; known are {", ".join(STEPS)}')
  with tempfile.TemporaryDirectory(prefix='gpu-day-') as work:
    return run_day(Day(args.out, Path(work), args.budget, only, args.dry))


if __name__ == '__main__':
  sys.exit(main())
