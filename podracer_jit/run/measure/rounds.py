"""Splits a round into what each worker did, from a trace of the profiler.

The trace says when each XLA operation ran, and the text of its program says which part of the round
it belongs to. Where several operations run at once, each counts for its share. Time in which none
runs is `between`. So the parts of a worker add up to the round.
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

from podracer_jit import loops
from podracer_jit.run import build
from podracer_jit.run.measure import memory_use
from podracer_jit.run.measure.segments import with_program
from podracer_jit.schemes.reports import Report

# What a worker does, in the order in which it is shown.
PARTS = ('environment', 'policy', 'storing', 'gradient', 'update', 'other arithmetic', 'between',
         'transfer', 'waiting', 'other')
SCOPES = dict(rollout=('storing', 'environment', 'policy'),
              learner=('gradient', 'update', 'storing'))  # it stores in a replay
SKIPPED, TRACED = 2, 3  # rounds: not looked at, and looked at
CONTAINERS = ('while', 'conditional', 'call')  # whose operations have events of their own
Span = tuple[float, float, str]  # start and end in seconds, part


class Round(NamedTuple):
  """A round that was split up. A lane is a worker; actors come before the learner."""

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

  Operations that contain others are left out.

  An operation that the compiler made, and gave no name, belongs to the part most around it have.
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
  edges = sorted([(max(a, start), 1, part) for a, b, part in spans if a < end and b > start]
                 + [(min(b, end), -1, part) for a, b, part in spans if a < end and b > start])
  total, active, last = collections.Counter(), collections.Counter(), start
  for at, step, part in [*edges, (end, 0, 'between')]:
    running = active.total()
    if not running:
      total['between'] += at - last
    for name, count in active.items():
      total[name] += (at - last) * count / running if running else 0.0
    active[part] += step
    last = at
  return dict(total)


def lane(own: Sequence[Span], ops: Sequence[Span], start: float, end: float
         ) -> tuple[dict[str, float], list[Span]]:
  """Returns the seconds of each part of a worker, and its spans.

  Args:
    own: the regions that the worker's thread was in.
    ops: the operations of its programs.
    start: of the time to look at, in seconds.
    end: of that time.
  """
  seconds, spans = collections.Counter(), []
  for a, b, region in own:
    a, b = max(a, start), min(b, end)
    if a >= b:
      continue
    if region.startswith('transfer'):
      seconds['transfer'] += b - a
      spans.append((a, b, 'transfer'))
      continue
    inside = [x for x in ops if x[0] < b and x[1] > a]
    spent = shares(inside, a, b)
    if region.startswith('wait'):  # until its thread wakes, but its program may be running by then
      spent['waiting'] = spent.pop('between', 0.0)
      spans.append((a, min([b, *(x[0] for x in inside)]), 'waiting'))
    seconds.update(spent)
    spans += inside
  seconds['other'] = end - start - sum(seconds.values())
  return dict(seconds), spans


@contextlib.contextmanager
def _sampling(tids: Sequence[int]) -> Iterator[None]:
  """Notes in the trace, every few milliseconds, how long EnvPool's threads have run."""
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
  return {int(x) for x in os.listdir('/proc/self/task')
          if not Path(f'/proc/self/task/{x}/comm').read_text().startswith('tf_')}


class _Programs:
  """The compiled programs of a segment, and their operations by the module's name in the trace."""

  def __init__(self):
    self.operations: dict[str, dict[str, str]] = {}
    self.memory: dict[str, dict[str, int]] = {}

  def add(self, compiled: Any) -> None:
    """Notes a program."""
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
  """Trains for some rounds with sync or cleanba, then for a few more under the profiler."""
  programs, times = _Programs(), []
  run = with_program(run, programs.learner(run.learner.program))
  state = run.learner.allocate(run.initial_state())
  count = SKIPPED + 2 * TRACED + 3
  with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
    tracing = contextlib.ExitStack()

    def report(item: Report) -> None:
      jax.block_until_ready(item.metrics)
      times.append(time.perf_counter())
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
      segment = stack.enter_context(build.segment(run, state, 0, count + 2, report))
    pools = sorted(_threads() - before)
    loops.run(segment.workers)
    (path,) = Path(directory).rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  plain = [b - a for a, b in itertools.pairwise(times[SKIPPED - 1:SKIPPED + TRACED])]
  return read(events, programs.operations, statistics.median(plain),
              [d.id for d in run.place.actors])._replace(memory=programs.memory)


def read(events: Sequence[Mapping[str, Any]], operations: Mapping[str, Mapping[str, str]],
         seconds: float, actor_devices: Sequence[int]) -> Round:
  """Splits the rounds of a trace.

  Args:
    events: of the trace.
    operations: the part of each operation, by module and by operation.
    seconds: of a round without a trace, to which the parts are scaled.
    actor_devices: ids of the devices of the actors.
  """
  own, ops, busy = collections.defaultdict(list), collections.defaultdict(list), []
  for event in events:
    if event.get('ph') != 'X':
      continue
    start, name, args = event['ts'] / 1e6, event['name'], event.get('args', {})
    span = start, start + event['dur'] / 1e6
    part = operations.get(args.get('hlo_module'), {}).get(args.get('hlo_op'))
    if part:
      device = int(args['device_ordinal']) if 'device_ordinal' in args else None
      ops[args['hlo_module'], device].append((*span, part))
    elif name == 'envpool':
      busy.append((start, int(args['busy_ns']) / 1e9))
    elif re.match('rollout$|learn$|make: |transfer: |wait: ', name):
      own[event['tid']].append((*span, name))
  lanes, ends = _workers(own)
  rounds, start, end = len(ends) - 1, ends[0], ends[-1]
  result, spans = {}, {}
  for name, regions in sorted(lanes.items()):
    devices = [None, actor_devices[int(name.split()[1])]] if name != 'learner' else None
    kind = 'rollout' if devices else 'learner'
    mine = [span for (module, device), spans in ops.items() for span in spans
            if kind in module and (devices is None or device in devices)]
    parts, spans[name] = lane(regions, mine, start, end)
    scale = seconds / (end - start)
    result[name] = {part: parts[part] * scale for part in PARTS if part in parts}
  cores = [(at, (done - before) / (at - last))
           for (last, before), (at, done) in itertools.pairwise(busy) if at > last]
  return Round(seconds, (end - start) / rounds, result, spans,
               [x for x in cores if start <= x[0] <= end], ends, {})


def _workers(own: Mapping[int, Sequence[Span]]) -> tuple[dict[str, Sequence[Span]], list[float]]:
  """Returns the regions of each worker by name, and the times when updates ended."""
  lanes, ends = {}, []
  for regions in own.values():
    names = {region for _, _, region in regions}
    if 'learn' in names:
      lanes['learner'] = regions
      ends = sorted(b for _, b, region in regions if region == 'transfer: reports')
    elif 'rollout' in names:
      (number,) = {m[1] for m in (re.search(r'actor (\d+)', name) for name in names) if m}
      lanes[f'actor {number}'] = regions
  return lanes, ends
