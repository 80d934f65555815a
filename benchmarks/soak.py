"""Checks in a long training that memory, threads and open files do not grow.

.venv/bin/python -m benchmarks.soak [--config=impala_catch] [--minutes=20] [--every_updates=200]

Starts an endless training with short segments as a child process. From the first update it samples
the resident memory of the process and the parts of it, its threads, open files, memory mappings,
and update. After --minutes, or --segments, it ends the training by SIGTERM. Then it prints

- a table of ten rows over the segments;
- the growth of each kind of memory for each segment and each update, by least squares over the
  second half of the samples;
- threads, open files and mappings in the second half;
- the seconds of a segment in the first tenth and in the last, which show a cost that grows with
  the length of a run;
- the sizes of the files in the workdir.

Other flags of training (--config.NAME=VALUE) are passed on.

Exit code: 0 no problem; 1 threads, open files or mappings grow, memory grows by more than
--max_growth_kb a segment, segments take more than --max_slowdown times as long at the end, or the
training failed; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROWS = 10  # of the table
MEMORY = ('rss', 'anonymous', 'heap', 'code', 'files')
COUNTS = ('threads', 'fds', 'mappings')
# TensorStore's thread pool, whose size is limited, starts a thread when all others are at work. It
# may grow for a long time, so its threads are not counted.
POOL_THREAD = 'ts_pool_worker'
# Medians of two quarters may differ by this without a leak: threads of a segment come and go. Each
# compiled program has a few mappings, and several are alive at a segment's boundary.
SLACK = dict(threads=2, fds=2, mappings=40)
MIN_SEGMENTS = 10  # fewer do not show whether memory grows
STOPPED = (0, 3)  # exit codes of a training that a signal stopped


class Sample(NamedTuple):
  """Measurements of a process at one time. Memory is in bytes."""

  seconds: float  # since the process was started
  update: int
  rss: int  # all resident memory
  anonymous: int  # the part of `rss` without a file: heap, arrays, compiled programs
  heap: int  # the part of `anonymous` in the C library's main heap
  code: int  # the part of `anonymous` that is executable: compiled programs
  files: int  # resident pages of files, such as shared libraries
  threads: int  # without TensorStore's pool
  fds: int
  mappings: int


# Reading a process.


def read_sample(pid: int, seconds: float, update: int) -> Sample:
  """Reads a process from /proc.

  Raises:
    OSError: the process has ended.
  """
  rollup = read_fields(Path(f'/proc/{pid}/smaps_rollup').read_text())
  heap, code, mappings = read_mappings(Path(f'/proc/{pid}/smaps').read_text())
  rss = rollup['Rss'] * 1024
  anonymous = rollup['Anonymous'] * 1024
  return Sample(seconds, update, rss, anonymous, heap, code, rss - anonymous, count_threads(pid),
                len(os.listdir(f'/proc/{pid}/fd')), mappings)


def count_threads(pid: int) -> int:
  """Returns the number of threads of a process, without those of TensorStore's pool.

  Raises:
    OSError: the process has ended.
  """
  count = 0
  for thread in Path(f'/proc/{pid}/task').iterdir():
    try:
      count += (thread / 'comm').read_text().strip() != POOL_THREAD
    except (FileNotFoundError, ProcessLookupError):
      continue  # the thread has ended
  return count


def read_fields(text: str) -> dict[str, int]:
  """Returns the numbers of a file with lines such as `VmRSS:  1234 kB`."""
  fields = {}
  for line in text.splitlines():
    name, _, value = line.partition(':')
    words = value.split()
    if words and words[0].isdigit():
      fields[name] = int(words[0])
  return fields


def read_mappings(text: str) -> tuple[int, int, int]:
  """Reads /proc/PID/smaps.

  Returns:
    Anonymous bytes of the main heap, anonymous bytes that are executable, the number of mappings.
  """
  heap = code = mappings = 0
  is_heap = is_code = False
  for line in text.splitlines():
    words = line.split()
    if not words[0].endswith(':'):  # a mapping: addresses, permissions, offset, device, inode, name
      mappings += 1
      is_heap = words[-1] == '[heap]'
      is_code = 'x' in words[1] and words[4] == '0'
    elif words[0] == 'Anonymous:':
      heap += is_heap * int(words[1]) * 1024
      code += is_code * int(words[1]) * 1024
  return heap, code, mappings


def read_update(path: Path) -> int:
  """Returns the update of the last whole line of metrics.jsonl; 0 if there is none."""
  if not path.exists():
    return 0
  with path.open('rb') as file:
    file.seek(max(0, path.stat().st_size - 8192))
    lines = file.read().split(b'\n')
  for line in reversed(lines[:-1]):
    try:
      return int(json.loads(line)['update'])
    except ValueError:
      continue  # the read began in the middle of this line
  return 0


# Statistics of the samples.


def slope(samples: Sequence[Sample], name: str, every_updates: int) -> float:
  """Returns the growth of a field for each segment, by least squares over the second half."""
  half = samples[len(samples) // 2:]
  segments = np.array([sample.update for sample in half]) / every_updates
  if segments.size < 2 or np.ptp(segments) == 0:
    return 0.0
  return float(np.polyfit(segments, [getattr(sample, name) for sample in half], 1)[0])


def count_growth(samples: Sequence[Sample], name: str) -> float:
  """Returns how much a count grows from the third quarter to the last.

  It is the growth of the minimum or of the median, whichever is smaller. A leak raises both. The
  median also depends on how many samples fall into a save, and the minimum on whether a sample
  falls between two segments, when the programs of neither are loaded.
  """
  quarter = len(samples) // 4
  if not quarter:
    return 0.0
  before, last = ([getattr(sample, name) for sample in part]
                  for part in (samples[-2 * quarter:-quarter], samples[-quarter:]))
  return min(min(last) - min(before), float(np.median(last) - np.median(before)))


def segment_seconds(samples: Sequence[Sample], every_updates: int) -> tuple[float, float]:
  """Returns the seconds of a segment in the first tenth of the updates and in the last.

  Times between samples are interpolated.
  """
  if len(samples) < 2 or samples[-1].update == samples[0].update:
    return 0.0, 0.0
  updates = [sample.update for sample in samples]
  first = updates[0]
  last = updates[-1]
  tenth = (last - first) / 10
  times = np.interp([first, first + tenth, last - tenth, last], updates,
                    [sample.seconds for sample in samples])
  segments_per_tenth = tenth / every_updates
  return (float(times[1] - times[0]) / segments_per_tenth,
          float(times[3] - times[2]) / segments_per_tenth)


def problems(samples: Sequence[Sample], every_updates: int, max_growth_kb: float,
             max_slowdown: float) -> list[str]:
  """Returns a line for each figure that grows beyond its limit.

  Args:
    samples: the samples of a run from its first update.
    every_updates: updates of a segment.
    max_growth_kb: resident memory may grow by this in each segment.
    max_slowdown: limit of the seconds of a segment at the end over those at the beginning.
  """
  lines = []
  for name in COUNTS:
    growth = count_growth(samples, name)
    if growth > SLACK[name]:
      lines.append(f'{name} grow: by {growth:g} from the third quarter of the run to the last')
  segments = samples[-1].update / every_updates
  if segments < MIN_SEGMENTS:
    return [*lines, f'the training made {segments:.1f} segments; {MIN_SEGMENTS} are needed to '
            'measure the growth of memory']
  growth = slope(samples, 'rss', every_updates) / 1024
  if growth > max_growth_kb:
    lines.append(f'memory grows by {growth:,.0f} KB a segment, more than {max_growth_kb:,.0f}')
  first, last = segment_seconds(samples, every_updates)
  if last > max_slowdown * first:
    lines.append(f'a segment takes {last:.2f} s in the last tenth, {first:.2f} s in the first')
  return lines


def print_report(samples: Sequence[Sample], every_updates: int, sizes: dict[str, int]) -> None:
  """Prints the table, the growth and the sizes of files."""
  mb = 2**20
  print(f'{"segment":>8}{"update":>9}{"seconds":>9}'
        + ''.join(f'{name + " MB":>13}' for name in MEMORY)
        + ''.join(f'{name:>9}' for name in COUNTS))
  last = samples[-1].update
  for k in range(1, ROWS + 1):
    sample = next(s for s in samples if s.update >= last * k / ROWS)
    print(f'{sample.update / every_updates:8.1f}{sample.update:9}{sample.seconds:9.1f}'
          + ''.join(f'{getattr(sample, name) / mb:13.1f}' for name in MEMORY)
          + ''.join(f'{getattr(sample, name):9}' for name in COUNTS))
  print('growth over the second half, by least squares:')
  for name in MEMORY:
    growth = slope(samples, name, every_updates)
    print(f'  {name:10}{growth / 1024:12,.1f} KB a segment {growth / every_updates:12,.1f} bytes '
          'an update')
  half = samples[len(samples) // 2:]
  for name in COUNTS:
    values = [getattr(sample, name) for sample in half]
    print(f'  {name:10}{min(values):6} to {max(values)} in the second half')
  first, last_s = segment_seconds(samples, every_updates)
  print(f'seconds of a segment: {first:.3f} in the first tenth, {last_s:.3f} in the last')
  print('files: ' + ', '.join(f'{name} {size / mb:,.2f} MB' for name, size in sizes.items()))


def file_sizes(workdir: Path) -> dict[str, int]:
  """Returns the bytes of each file in a workdir, and of each folder with its contents."""
  def size(path: Path) -> int:
    return sum(p.stat().st_size for p in [path, *path.rglob('*')] if p.is_file())

  return {path.name: size(path) for path in sorted(workdir.iterdir())}


# The script.


class Failed(RuntimeError):
  """The training ended by itself, or did not end after SIGTERM."""


def watch(process: subprocess.Popen, workdir: Path, max_seconds: float, max_updates: float,
          interval_s: float) -> list[Sample]:
  """Samples a training from its first update until it has run for long enough.

  Samples from before would show growth that is no leak: the training is being compiled.

  Args:
    process: the training.
    workdir: the workdir of the training.
    max_seconds: the function returns after this many seconds, even if there was no update.
    max_updates: the samples end after this many updates.
    interval_s: seconds between two samples.

  Raises:
    Failed: the training ended before.
  """
  start = time.monotonic()
  samples = []
  seconds = 0.0
  update = 0
  while seconds < max_seconds and update < max_updates:
    time.sleep(interval_s)
    if process.poll() is not None:
      raise Failed(f'the training ended with exit code {process.returncode}')
    seconds = time.monotonic() - start
    update = read_update(workdir / 'metrics.jsonl')
    if not update:
      continue
    try:
      samples.append(read_sample(process.pid, seconds, update))
    except OSError:  # the process has ended meanwhile
      raise Failed(f'the training ended with exit code {process.wait(60)}') from None
  return samples


def soak(args: argparse.Namespace, passed_on: Sequence[str], root: Path) -> list[str]:
  """Trains in `root` and prints the report; returns a line for each problem.

  Args:
    args: the parsed arguments of the script.
    passed_on: flags of training.
    root: a folder for the workdir and the log.
  """
  workdir = root / 'run'
  log = root / 'log'
  command = [sys.executable, '-m', 'podracer_jit', f'--config={args.config}',
             f'--config.env.renew_every_updates={args.every_updates}',
             f'--config.checkpoint.every_updates={args.every_updates}',
             f'--config.total_steps={2**30}', *passed_on, f'--workdir={workdir}']
  with log.open('w') as file:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file,
                               stderr=subprocess.STDOUT)
  max_updates = args.segments * args.every_updates if args.segments else float('inf')
  try:
    samples = watch(process, workdir, args.minutes * 60, max_updates, args.interval_s)
    process.send_signal(signal.SIGTERM)
    code = process.wait(120)
    if code not in STOPPED:
      raise Failed(f'the training ended with exit code {code} after SIGTERM')
  except subprocess.TimeoutExpired:
    return ['the training still runs 120 s after SIGTERM']
  except (Failed, OSError) as error:
    tail = '\n  '.join(log.read_text(errors='replace').splitlines()[-5:])
    return [f'{error}\n  {tail}']
  finally:
    process.kill()
    process.wait()
  if not samples:
    return ['the training made no update']
  print_report(samples, args.every_updates, file_sizes(workdir))
  if args.json:
    rows: list[dict[str, Any]] = [sample._asdict() for sample in samples]
    args.json.write_text(json.dumps(rows) + '\n')
  return problems(samples, args.every_updates, args.max_growth_kb, args.max_slowdown)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', default='impala_catch', help='the --config of the training')
  parser.add_argument('--minutes', type=float, default=20.0, help='length of the training')
  parser.add_argument('--segments', type=int, default=0,
                      help='ends the training after so many segments; 0: no limit')
  parser.add_argument('--every_updates', type=int, default=200, help='updates of a segment')
  parser.add_argument('--interval_s', type=float, default=2.0, help='seconds between two samples')
  parser.add_argument('--max_growth_kb', type=float, default=1024.0,
                      help='limit of the growth of memory in a segment')
  parser.add_argument('--max_slowdown', type=float, default=2.0,
                      help="limit of a segment's time at the end over its time at the beginning")
  parser.add_argument('--json', type=Path, help='a file for all samples')
  parser.add_argument('--keep_workdir', action='store_true', help='does not delete the workdir')
  args, passed_on = parser.parse_known_args(argv)
  unknown = [flag for flag in passed_on if not flag.startswith('--config.')]
  if unknown:
    print(f'soak: {unknown[0]}: unknown flag', file=sys.stderr)
    return 2
  # SIGTERM must unwind the stack, so that `finally` ends the training.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  root = Path(tempfile.mkdtemp(prefix='soak-'))
  try:
    lines = soak(args, passed_on, root)
    for line in lines:
      print(f'WRONG: {line}')
    if not lines:
      print('memory, threads and open files are bounded')
    return 1 if lines else 0
  finally:
    if args.keep_workdir:
      print(f'the workdir is {root / "run"}')
    else:
      shutil.rmtree(root)


if __name__ == '__main__':
  sys.exit(main())
