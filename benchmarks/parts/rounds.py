"""Splits the time of a round into parts for each worker, with a trace of the profiler.

The trace has the times of each XLA operation. The text of the program assigns each operation to a
part of the round. Operations that run at once share the time equally. Time without an operation
counts as `between`. So the parts of a worker add up to the round.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import itertools
import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.parts import memory_use
from benchmarks.parts.segments import with_program
from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.schemes.reports import Report

# The parts of a round, in the order of the table.
PARTS = ('environment', 'policy', 'storing', 'gradient', 'update', 'other arithmetic', 'between',
         'transfer', 'waiting', 'other')
# Named scopes of each program; a learner stores into its replay.
SCOPES = dict(rollout=('storing', 'environment', 'policy'),
              learner=('gradient', 'update', 'storing'))
SKIPPED = 2  # rounds that are a warm-up
TRACED = 3  # rounds that are measured without a trace, and again with one
# The operations inside of these have events of their own.
CONTAINERS = ('while', 'conditional', 'call')
Span = tuple[float, float, str]  # start and end in seconds, part


class Round(NamedTuple):
  """A round, split into parts. A lane is a worker; actors come before the learner."""

  seconds: float  # of a round without a trace: the median
  traced_seconds: float
  lanes: dict[str, dict[str, float]]  # seconds of each part, scaled to add up to `seconds`
  spans: dict[str, list[Span]]  # of the traced rounds, for the picture
  env_threads: list[tuple[float, float]]  # (time, cores that EnvPool kept busy until then)
  ends: list[float]  # of the traced rounds
  memory: dict[str, dict[str, int]]  # bytes of each program, by its name: see `memory_use`


def part_of(op_name: str, scopes: Sequence[str]) -> str:
  """Returns the part of an operation, by its `op_name` in the text of the program."""
  return next((scope for scope in scopes if re.search(rf'\b{scope}\b', op_name)),
              'other arithmetic')


def operations(text: str, scopes: Sequence[str]) -> dict[str, str]:
  """Returns the part of each operation of a compiled program, by the operation's name.

  Operations that contain others are left out. An operation without an `op_name` was made by the
  compiler; it gets the most frequent part of its computation.
  """
  part_by_name: dict[str, str] = {}
  for computation in re.split(r'\n(?=\S)', text):
    lines = re.findall(r'^ +(?:ROOT )?%?([\w.-]+) = .*?\b([\w-]+)\(.*$', computation, re.MULTILINE)
    named = dict(re.findall(r'^ +(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', computation,
                            re.MULTILINE))
    parts = collections.Counter(part_of(op_name, scopes) for op_name in named.values())
    usual = parts.most_common(1)[0][0] if parts else 'other arithmetic'
    for name, opcode in lines:
      if opcode not in CONTAINERS:
        part_by_name[name] = part_of(named[name], scopes) if name in named else usual
  return part_by_name


def shares(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
  """Returns the seconds of each part between start and end; spans that overlap share the time."""
  inside = [(max(a, start), min(b, end), part) for a, b, part in spans if a < end and b > start]
  # A sweep over the times at which an operation begins (+1) or ends (-1).
  edges = sorted([(a, 1, part) for a, _, part in inside]
                 + [(b, -1, part) for _, b, part in inside])
  total = collections.Counter()
  active = collections.Counter()
  last = start
  for at, step, part in [*edges, (end, 0, 'between')]:
    running = active.total()
    if not running:
      total['between'] += at - last
    for name, count in active.items():
      total[name] += (at - last) * count / running if running else 0.0
    active[part] += step
    last = at
  return dict(total)


def lane(regions: Sequence[Span], ops: Sequence[Span], start: float, end: float
         ) -> tuple[dict[str, float], list[Span]]:
  """Returns the seconds of each part of a worker, and its spans.

  Args:
    regions: the annotated regions of the worker's thread.
    ops: the operations of the worker's programs.
    start: when the rounds start, in seconds.
    end: when the rounds end, in seconds.
  """
  seconds = collections.Counter()
  spans = []
  for a, b, region in regions:
    a = max(a, start)
    b = min(b, end)
    if a >= b:
      continue
    if region.startswith('transfer'):
      seconds['transfer'] += b - a
      spans.append((a, b, 'transfer'))
      continue
    inside = [x for x in ops if x[0] < b and x[1] > a]
    spent = shares(inside, a, b)
    if region.startswith('wait'):
      # The region ends when the thread wakes; its program may already be running.
      spent['waiting'] = spent.pop('between', 0.0)
      spans.append((a, min([b, *(x[0] for x in inside)]), 'waiting'))
    seconds.update(spent)
    spans += inside
  seconds['other'] = end - start - sum(seconds.values())
  return dict(seconds), spans


@contextlib.contextmanager
def _sampling(tids: Sequence[int]) -> Iterator[None]:
  """Adds the run time of EnvPool's threads to the trace every few milliseconds."""
  stop = threading.Event()

  def sample():
    while not stop.wait(0.003):
      busy = 0
      for tid in tids:
        with contextlib.suppress(OSError):
          busy += int(Path(f'/proc/self/task/{tid}/schedstat').read_text().split()[0])
      with jax.profiler.TraceAnnotation('envpool', busy_ns=busy):
        pass

  thread = threading.Thread(target=sample)
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()


def _threads() -> set[int]:
  """Returns the ids of this process's threads; omits the threads of XLA's pool."""
  return {int(x) for x in os.listdir('/proc/self/task')
          if not Path(f'/proc/self/task/{x}/comm').read_text().startswith('tf_')}


class _Programs:
  """The compiled programs of a segment, and their operations by the module's name in the trace."""

  def __init__(self):
    self.operations: dict[str, dict[str, str]] = {}
    self.memory: dict[str, dict[str, int]] = {}

  def add(self, compiled: Any) -> None:
    """Records a program."""
    text = compiled.as_text()
    name = re.match(r'HloModule ([\w.-]+)', text)[1]
    self.operations[name] = operations(text, SCOPES['rollout' if 'rollout' in name else 'learner'])
    self.memory[name.removeprefix('jit_')] = memory_use.program_memory(compiled)

  def learner(self, program: Any) -> Any:
    """Returns the learner's program, compiled at its first call, so that its text can be read."""
    compiled = []

    def call(*args):
      if not compiled:
        compiled.append(program.lower(*args).compile())
        self.add(compiled[0])
      return compiled[0](*args)

    return call


def measure(run: build.Run) -> Round:
  """Trains for some rounds, then for a few more under the profiler.

  Args:
    run: a run with the scheme `sync` or `cleanba`.
  """
  programs = _Programs()
  times = []  # when each update was reported
  run = with_program(run, programs.learner(run.learner.program))
  state = run.learner.allocate(run.initial_state())
  count = SKIPPED + 2 * TRACED + 3
  with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
    tracing = contextlib.ExitStack()

    def report(item: Report) -> None:
      jax.block_until_ready(item.metrics)
      times.append(time.perf_counter())
      # One more round lies between the two measurements: starting the trace takes time.
      if len(times) == SKIPPED + TRACED + 1:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=options)
        tracing.enter_context(_sampling(pools))
      elif len(times) == count:
        tracing.close()
        jax.profiler.stop_trace()

    before = _threads()
    with memory_use.loading(programs.add):
      segment = stack.enter_context(build.segment(
          run, build.Snapshot(state), count + 2, report))
    pools = sorted(_threads() - before)
    loops.run(segment.workers)
    (path,) = Path(directory).rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  untraced = [b - a for a, b in itertools.pairwise(times[SKIPPED - 1:SKIPPED + TRACED])]
  actor_devices = [device.id for device in run.place.actors]
  result = read(events, programs.operations, statistics.median(untraced), actor_devices)
  return result._replace(memory=programs.memory)


def read(events: Sequence[Mapping[str, Any]], operations: Mapping[str, Mapping[str, str]],
         seconds: float, actor_devices: Sequence[int]) -> Round:
  """Splits the rounds of a trace.

  Args:
    events: the events of the trace.
    operations: the part of each operation, by module and by operation.
    seconds: duration of a round without a trace, to which the parts are scaled.
    actor_devices: ids of the devices of the actors.
  """
  regions_by_thread = collections.defaultdict(list)
  ops = collections.defaultdict(list)  # operations by (module, device)
  busy = []  # (time, run time of EnvPool's threads), in seconds
  for event in events:
    if event.get('ph') != 'X':
      continue
    name = event['name']
    args = event.get('args', {})
    start = event['ts'] / 1e6
    span = (start, start + event['dur'] / 1e6)
    part = operations.get(args.get('hlo_module'), {}).get(args.get('hlo_op'))
    if part:
      device = int(args['device_ordinal']) if 'device_ordinal' in args else None
      ops[args['hlo_module'], device].append((*span, part))
    elif name == 'envpool':
      busy.append((start, int(args['busy_ns']) / 1e9))
    elif re.match('rollout$|learn$|make: |transfer: |wait: ', name):
      regions_by_thread[event['tid']].append((*span, name))

  lanes, ends = _workers(regions_by_thread)
  start = ends[0]
  end = ends[-1]
  parts_by_lane = {}
  spans_by_lane = {}
  for name, regions in sorted(lanes.items()):
    # Events of CPU devices have no device.
    devices = [None, actor_devices[int(name.split()[1])]] if name != 'learner' else None
    kind = 'rollout' if devices else 'learner'
    worker_ops = [span for (module, device), spans in ops.items() for span in spans
                  if kind in module and (devices is None or device in devices)]
    parts, spans_by_lane[name] = lane(regions, worker_ops, start, end)
    # The profiler slows a round down, so the parts are scaled to a round without it.
    scale = seconds / (end - start)
    parts_by_lane[name] = {part: parts[part] * scale for part in PARTS if part in parts}

  env_threads = [(at, (busy_s - last_busy_s) / (at - last))
                 for (last, last_busy_s), (at, busy_s) in itertools.pairwise(busy) if at > last]
  return Round(
      seconds=seconds,
      traced_seconds=(end - start) / (len(ends) - 1),
      lanes=parts_by_lane,
      spans=spans_by_lane,
      env_threads=[x for x in env_threads if start <= x[0] <= end],
      ends=ends,
      memory={})


def _workers(regions_by_thread: Mapping[int, Sequence[Span]]
             ) -> tuple[dict[str, Sequence[Span]], list[float]]:
  """Returns the regions of each worker by name, and the times when updates ended."""
  lanes = {}
  ends = []
  for regions in regions_by_thread.values():
    names = {region for _, _, region in regions}
    if 'learn' in names:
      lanes['learner'] = regions
      ends = sorted(b for _, b, region in regions if region == 'transfer: reports')
    elif 'rollout' in names:
      (number,) = {m[1] for m in (re.search(r'actor (\d+)', name) for name in names) if m}
      lanes[f'actor {number}'] = regions
  return lanes, ends
