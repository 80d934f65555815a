"""Stops runs at random moments, goes on with them, and checks that the stops change nothing.

.venv/bin/python -m benchmarks.kill_resume [--rows=sync,cleanba] [--kills=12] [--seed=1]

Each row trains a small experiment. A run that is never stopped gives the expected receipts and
metrics, and the length of a run. A second run is stopped by SIGKILL, SIGTERM or SIGINT (Ctrl-C),
and started again until it has finished. If it finishes before all its stops were made, another run
begins in a new workdir. All of this is drawn from --seed, for each process:

- the signal: half of them are SIGKILL;
- the moment: half are uniform in time, from the start of the process. The others follow a write to
  the workdir (a checkpoint that begins, a new checkpoint, a new line) by 0 to 20 ms;
- when it saves: `checkpoint.every_seconds` and `checkpoint.every_updates`, so that checkpoints lie
  anywhere in a segment;
- where it runs, if the row has several places: other devices, actors and threads, or another number
  of processes.

After each stop, the newest checkpoint must still be in the workdir, and the updates of
metrics.jsonl and receipts.jsonl must be gapless. After SIGTERM and SIGINT, the exit code must be 3,
with a checkpoint of the last update, or 130 if the training had not begun. The next process must go
on from the newest checkpoint. A finished run must have each update once, in order. With a
deterministic scheme, its receipts and metrics (except times) must equal those of the run that was
never stopped.

`launch_process` and `launch_launcher` are runs of two processes. A signal hits one of the processes
or the launcher; Ctrl-C always hits the launcher, which passes it on. Processes whose launcher is
gone must end, and so must the processes of Gymnasium environments.

Exit code: 0 all rows passed, 1 a row failed (its workdirs are kept), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl.flags import FlagValues

from podracer_jit.errors import FINISHED, INTERRUPTED, STOPPED
from podracer_jit.experiment import flags
from podracer_jit.experiment.resolve import resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.workdir import journal
from podracer_jit.workdir.checkpoints import MANIFEST
from tests.flags import COMPILED_SOON

POLL_S = 0.002
MAX_DELAY_S = 0.02  # between a write and the signal
MOST_LINES = 60  # before a signal that follows a line
ORPHAN_GRACE_S = 60.0  # processes may outlive the one that started them by this, as they save first
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# `preparing` is until the first new update: environments are replayed, and programs compiled.
PHASES = ('starting', 'preparing', 'training', 'writing')
EVENTS = ('draft', 'checkpoint', 'line')  # the writes that a signal may follow
# In metrics.jsonl.
TIMES = {'sps', 'elapsed_s', 'wall_s', 'actor_wait_s', 'learner_wait_s', 'samples_per_s',
         'memory_mb'}


class Place(NamedTuple):
  """Where a process runs; with a deterministic scheme, it does not change the result."""

  actors: tuple[int, ...] = (0,)  # devices
  learners: tuple[int, ...] = (0,)  # devices
  actors_per_device: int = 1
  env_threads: int = 1
  updates_per_call: int = 16
  processes: int = 1

  def flags(self) -> list[str]:
    """Returns the flags of the placement."""
    fields = dict(actor_devices=self.actors, learner_devices=self.learners,
                  actors_per_device=self.actors_per_device, env_threads=self.env_threads,
                  updates_per_call=self.updates_per_call)
    return [f'--config.placement.{name}={value}' for name, value in fields.items()]


class Row(NamedTuple):
  """An experiment, and where its processes may run: a row of the result table."""

  name: str
  experiment: Sequence[str]  # flags
  places: Sequence[Place]
  signals_launcher: bool = False

  def flags(self, place: Place) -> list[str]:
    """Returns the flags of training in a place, without --workdir."""
    return [*self.experiment, *place.flags()]


class Stop(NamedTuple):
  """A signal, and its moment: a delay after the start of the process, or after a write."""

  signal: signal.Signals
  process: int | None  # which process of a launcher gets it; None: the one that was started
  event: str  # of EVENTS, or 'time'
  count: int  # the delay begins after this many events; unused for 'time'
  delay_s: float


class Files(NamedTuple):
  """The contents of a workdir."""

  metrics: str  # text of metrics.jsonl
  receipts: str  # text of receipts.jsonl
  checkpoints: list[int]  # updates of the complete checkpoints, ascending
  drafts: set[str]  # names of incomplete checkpoints and files

  @property
  def newest(self) -> int:
    """Update of the newest complete checkpoint; 0 if there is none."""
    return max(self.checkpoints, default=0)


class Ended(NamedTuple):
  """The end of a process."""

  code: int | None  # its exit code; None if it did not end
  phase: str  # of PHASES, when a signal was sent; '' if none was
  output: str
  problem: str  # '' if none
  seconds: float  # until the signal, or the end
  first_update_s: float  # from the start of the process to its first line


class Result(NamedTuple):
  """The result of a row."""

  row: Row
  signals: list[signal.Signals]  # of all stops
  phases: list[str]  # of all stops
  resumed_from: list[int]  # for each resumed process, the update of its checkpoint; 0: none
  verdict: str
  failed: bool
  notes: list[str]


# Checks of a workdir's files. They are functions of the files' text.


def parse(text: str) -> tuple[list[dict[str, Any]], list[int]]:
  """Parses a file of JSON lines.

  Returns:
    The JSON objects, and the numbers (from 1) of the garbled lines. A last line without a newline
    is garbled, even if it is JSON: the process may have been killed while it wrote a number.
  """
  entries = []
  garbled = []
  lines = text.split('\n')
  for number, line in enumerate(lines, 1):
    if number == len(lines):
      if line:
        garbled.append(number)
      continue
    try:
      entry = json.loads(line)
    except json.JSONDecodeError:
      entry = None
    if isinstance(entry, dict):
      entries.append(entry)
    else:
      garbled.append(number)
  return entries, garbled


def order_problem(text: str, may_be_cut: bool) -> str:
  """Checks that the updates of a file are 1, 2, 3 and so on.

  Args:
    text: of metrics.jsonl or receipts.jsonl.
    may_be_cut: whether the last line may be incomplete, as after a kill.

  Returns:
    The problem; '' if there is none.
  """
  entries, garbled = parse(text)
  lines = text.count('\n') + 1
  bad = [number for number in garbled if not (may_be_cut and number == lines)]
  if bad:
    return f'line {bad[0]} is garbled'
  expected = 1
  for entry in entries:
    if 'segment' in entry:
      if entry.get('first_update') != expected:
        return (f'a segment begins with update {entry.get("first_update")} where update {expected} '
                'was expected')
      continue
    if entry.get('update') != expected:
      return f'update {entry.get("update")} stands where update {expected} was expected'
    expected += 1
  return ''


def last_update(text: str) -> int:
  """Returns the last update of a file's whole lines; 0 if there is none."""
  return max((entry.get('update', 0) for entry in parse(text)[0]), default=0)


def problem_after_stop(files: Files, newest_before: int) -> str:
  """Checks a workdir whose process has just been stopped.

  Args:
    files: the files of the workdir after the stop.
    newest_before: update of the newest checkpoint just before the signal; 0: none.

  Returns:
    The problem; '' if there is none.
  """
  if files.newest < newest_before:
    return f'the checkpoint of update {newest_before} is gone; the newest is that of {files.newest}'
  for name, text in (('metrics', files.metrics), ('receipts', files.receipts)):
    problem = order_problem(text, may_be_cut=True)
    if problem:
      return f'{name}.jsonl: {problem}'
    if last_update(text) < files.newest:
      return (f'{name}.jsonl ends with update {last_update(text)}, before the checkpoint of '
              f'{files.newest}')
  return ''


def problem_of_code(code: int, number: signal.Signals, output: str, files: Files) -> str:
  """Checks the exit code of a process after a signal other than SIGKILL.

  Args:
    code: the exit code.
    number: the signal.
    output: the output of the process.
    files: the files of the workdir after its end.

  Returns:
    The problem; '' if there is none.
  """
  if code == STOPPED:
    lasts = {last_update(files.metrics), last_update(files.receipts)}
    if files.newest and lasts == {files.newest}:
      return ''
    return (f'exit code {code} after update {max(lasts)}, though the newest checkpoint is that of '
            f'{files.newest}')
  if going_on_from(output) is None:
    # Python itself handles a signal before the package is imported.
    is_right = code in (INTERRUPTED, -number)
  else:
    is_right = code == INTERRUPTED and not last_update(files.metrics)
  return '' if is_right else f'exit code {code} after {number.name}: {last_line(output)}'


def problem_at_end(files: Files) -> str:
  """Checks the workdir of a finished run; returns the problem, '' if there is none."""
  last = last_update(files.metrics)
  if not last:
    return 'metrics.jsonl has no update'
  for name, text in (('metrics', files.metrics), ('receipts', files.receipts)):
    problem = order_problem(text, may_be_cut=False)
    if problem:
      return f'{name}.jsonl: {problem}'
  if last_update(files.receipts) != last:
    return (f'metrics.jsonl ends with update {last}, receipts.jsonl with '
            f'{last_update(files.receipts)}')
  if files.newest != last:
    return f'the newest checkpoint is that of update {files.newest}, the last update is {last}'
  steps = [entry['steps'] for entry in parse(files.metrics)[0]]
  if any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
    return 'metrics.jsonl: steps do not increase with each update'
  return ''


def difference(expected: Files, files: Files) -> str:
  """Returns the first difference of a run from the one never stopped; '' if there is none."""
  def updates(text: str) -> list[dict[str, Any]]:
    return [entry for entry in parse(text)[0] if 'update' in entry]

  for name in ('receipts', 'metrics'):
    expected_entries = updates(getattr(expected, name))
    entries = updates(getattr(files, name))
    for wanted, entry in zip(expected_entries, entries, strict=False):
      fields = sorted(field for field in (wanted.keys() | entry.keys()) - TIMES
                      if wanted.get(field) != entry.get(field))
      if fields:
        return f'{name}.jsonl differs at update {wanted["update"]}: {", ".join(fields)}'
    if len(expected_entries) != len(entries):
      return (f'{name}.jsonl has {len(entries)} updates, {len(expected_entries)} in the run that '
              'was never stopped')
  return ''


def resume_problem(output: str, newest: int) -> str:
  """Checks that a process went on from the newest checkpoint.

  Args:
    output: the output of the process. A process that was stopped before it printed its start has
      no problem.
    newest: update of the newest checkpoint before it started; 0: none.

  Returns:
    The problem; '' if there is none.
  """
  resumed = going_on_from(output)
  if resumed is not None and resumed != newest:
    return f'it went on from update {resumed}, the newest checkpoint was that of {newest}'
  return ''


def going_on_from(output: str) -> int | None:
  """Returns the update that a process went on from; 0 for a new run; None if it printed neither."""
  match = re.search(r'going on from update (\d+)', output)
  if match:
    return int(match[1])
  return 0 if re.search(r': starting$', output, re.MULTILINE) else None


def phase_of_stop(output: str, before: Files, after: Files, has_update: bool) -> str:
  """Returns the phase of PHASES in which a process got a signal.

  Args:
    output: the output of the process.
    before: the workdir's files when it started.
    after: the workdir's files when it got the signal.
    has_update: whether it had written an update.
  """
  texts = (after.metrics, after.receipts)
  half_line = any(text and not text.endswith('\n') for text in texts)
  if after.drafts - before.drafts or half_line or last_update(texts[0]) != last_update(texts[1]):
    return 'writing'
  if going_on_from(output) is None:
    return 'starting'
  return 'training' if has_update else 'preparing'


def draw_stop(rng: random.Random, number: int, processes: int, first_update_s: float,
              whole_s: float) -> Stop:
  """Draws a stop.

  Args:
    rng: the generator to draw from.
    number: the number of the stop; even stops are uniform in time, odd stops follow a write.
    processes: of a launcher, one of which gets the signal; 0: the process that was started.
    first_update_s: seconds from the start of a process that is not stopped to its first update.
    whole_s: seconds from its start to its end.
  """
  by = rng.choice((signal.SIGKILL, *SIGNALS))
  process = rng.randrange(processes) if processes else None
  if number % 2 == 0:
    # The moment is in the first half of the training, so that a run lives through several stops.
    return Stop(by, process, 'time', 0, rng.uniform(0, (first_update_s + whole_s) / 2))
  # 'line' is twice as likely: stops uniform in time mostly hit the start, not the training.
  event = rng.choice((*EVENTS, 'line'))
  count = rng.randint(1, MOST_LINES if event == 'line' else 2)
  return Stop(by, process, event, count, rng.uniform(0, MAX_DELAY_S))


def draw_saves(rng: random.Random) -> list[str]:
  """Draws when a process saves; returns the flags."""
  every_seconds = rng.choice((0.0, rng.uniform(0.05, 3.0)))
  every_updates = rng.choice((0, rng.randint(5, 40)))
  return [f'--config.checkpoint.every_seconds={every_seconds:.2f}',
          f'--config.checkpoint.every_updates={every_updates}']


# Processes and their workdirs.


class Workdir(NamedTuple):
  """A workdir, which need not exist yet."""

  path: Path

  @property
  def folder(self) -> Path:
    """Folder of the checkpoints."""
    return self.path / 'checkpoints'

  def whole_checkpoints(self) -> list[int]:
    """Returns the updates of the complete checkpoints, ascending."""
    # The manifest is written last. Then the folder gets its name.
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    updates = sorted(int(name) for name in names if name.isdigit())
    return [n for n in updates if (self.folder / str(n) / MANIFEST).exists()]

  def files(self) -> Files:
    """Reads the workdir."""
    def text(name: str) -> str:
      path = self.path / name
      return path.read_text(errors='replace') if path.exists() else ''

    whole = self.whole_checkpoints()
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    drafts = {name for name in names if not (name.isdigit() and int(name) in whole)}
    drafts |= {path.name for path in self.path.glob('*.tmp')}
    return Files(text(journal.METRICS), text(journal.RECEIPTS), whole, drafts)


def children_of(pid: int) -> list[int]:
  """Returns the ids of the running children of process `pid`, ascending."""
  children = []
  for path in Path('/proc').glob('[0-9]*/stat'):
    try:
      state, parent = path.read_text().rpartition(') ')[2].split()[:2]
    except OSError:
      continue  # the process has ended meanwhile
    if int(parent) == pid and state != 'Z':
      children.append(int(path.parent.name))
  return sorted(children)


def descendants_of(pid: int) -> list[int]:
  """Returns the ids of the running children of process `pid`, and of theirs."""
  children = children_of(pid)
  return [*children, *(each for child in children for each in descendants_of(child))]


def alive(pid: int) -> bool:
  """Returns whether a process exists and is no zombie."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2].split()[0] != 'Z'
  except OSError:
    return False


def send(pid: int, number: signal.Signals) -> None:
  """Sends a signal to a process, which may have ended."""
  try:
    os.kill(pid, number)
  except ProcessLookupError:
    pass


class Watch:
  """Counts the writes to a workdir since the watch began."""

  def __init__(self, workdir: Path):
    self._workdir = workdir
    self._last_states = {event: self._state(event) for event in EVENTS}
    self.counts = collections.Counter()

  def _state(self, event: str) -> Any:
    """Returns the size of metrics.jsonl, or the folder names of 'draft' and 'checkpoint'."""
    folder = self._workdir / 'checkpoints'
    if event == 'line':
      path = self._workdir / journal.METRICS
      return path.stat().st_size if path.exists() else 0
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.isdigit() == (event == 'checkpoint')}

  def look(self) -> None:
    """Counts the writes since the last look."""
    for event in EVENTS:
      try:
        state = self._state(event)
      except FileNotFoundError:  # the file was replaced between two system calls
        continue
      before = self._last_states[event]
      self._last_states[event] = state
      if event == 'line':
        self.counts[event] += state > before
      else:
        self.counts[event] += len(state - before)


class Process:
  """A process that trains, or a launcher with its processes; a context manager that runs it."""

  def __init__(self, command: Sequence[str], log: Path, env: dict[str, str]):
    """Takes what to start.

    Args:
      command: its command line.
      log: a file for its output.
      env: its environment.
    """
    self._command = command
    self._log = log
    self._env = env
    self._descendants: list[int] = []  # when it got a signal

  def __enter__(self) -> Process:
    with self._log.open('w') as file:
      # With a session of its own, Ctrl-C reaches it and its workers, as in a terminal.
      self._popen = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=file,
                                     stderr=subprocess.STDOUT, env=self._env,
                                     start_new_session=True)
    return self

  def __exit__(self, *_: object) -> None:
    for pid in {*self._descendants, *descendants_of(self._popen.pid), self._popen.pid}:
      send(pid, signal.SIGKILL)
    self._popen.wait()

  def poll(self) -> int | None:
    """Returns the exit code; None while it runs."""
    return self._popen.poll()

  def output(self) -> str:
    """Returns the output up to now."""
    return self._log.read_text(errors='replace')

  def send(self, number: signal.Signals, process: int | None) -> str:
    """Sends a signal; returns once a process that gets SIGKILL has ended.

    Args:
      number: the signal.
      process: which process of a launcher gets it; None: this process.

    Returns:
      The problem; '' if there is none.
    """
    target = self._popen.pid
    if process is not None:
      # Wait until the launcher has started all of its processes.
      deadline = time.monotonic() + 30
      while len(children := children_of(target)) <= process and self.poll() is None:
        if time.monotonic() > deadline:
          return 'the launcher has not started its processes after 30 s'
        time.sleep(POLL_S)
      if self.poll() is None:
        target = children[process]
    self._descendants = descendants_of(self._popen.pid)
    if number == signal.SIGINT:
      os.killpg(self._popen.pid, number)
    else:
      send(target, number)
    while number == signal.SIGKILL and alive(target):
      time.sleep(POLL_S)
    return ''

  def wait_all(self, limit_s: float) -> str:
    """Waits until it and its descendants have ended; returns the problem, '' if there is none."""
    try:
      self._popen.wait(limit_s)
    except subprocess.TimeoutExpired:
      return f'it still runs {limit_s:.0f} s after the signal'
    deadline = time.monotonic() + ORPHAN_GRACE_S
    while any(map(alive, self._descendants)):
      if time.monotonic() > deadline:
        return (f'{sum(map(alive, self._descendants))} of its {len(self._descendants)} processes '
                f'were alive {ORPHAN_GRACE_S:.0f} s after it')
      time.sleep(0.05)
    return ''


def live(process: Process, workdir: Workdir, stop: Stop | None, limit_s: float) -> Ended:
  """Runs a process until it ends or is stopped, and checks what is left.

  Args:
    process: starts a run, or goes on with it.
    workdir: the workdir of the run.
    stop: the signal that it gets; None: none.
    limit_s: a process that takes longer counts as hanging, which is a problem.
  """
  before = workdir.files()
  watch = Watch(workdir.path)
  start = time.monotonic()
  first_update_s = 0.0
  due_s = stop.delay_s if stop and stop.event == 'time' else None  # None: its event is to come
  with process:
    while process.poll() is None:
      passed_s = time.monotonic() - start
      watch.look()
      if not first_update_s and watch.counts['line']:
        first_update_s = passed_s
      if stop and due_s is None and watch.counts[stop.event] >= stop.count:
        due_s = passed_s + stop.delay_s
      if due_s is not None and passed_s >= due_s:
        newest = workdir.files().newest
        problem = process.send(stop.signal, stop.process)
        phase = phase_of_stop(process.output(), before, workdir.files(), bool(first_update_s))
        problem = problem or process.wait_all(limit_s)
        code, output, after = process.poll(), process.output(), workdir.files()
        problem = problem or problem_after_stop(after, newest)
        if code and stop.signal != signal.SIGKILL:
          problem = problem or problem_of_code(code, stop.signal, output, after)
        return Ended(code, phase, output, problem, passed_s, first_update_s)
      if passed_s > limit_s:
        return Ended(None, '', process.output(), f'it had not ended after {limit_s:.0f} s',
                     passed_s, first_update_s)
      # Delays are as short as MAX_DELAY_S, so shortly before a signal the loop turns faster.
      near = due_s is not None and due_s - passed_s < 10 * POLL_S
      time.sleep(POLL_S / 4 if near else POLL_S)
    code = process.poll()
    output = process.output()
  problem = f'exit code {code}: {last_line(output)}' if code else ''
  return Ended(code, '', output, problem, time.monotonic() - start, first_update_s)


def last_line(output: str) -> str:
  """Returns the last line of an output that has text; 'no output' if there is none."""
  return next((line for line in reversed(output.splitlines()) if line.strip()), 'no output')


# Rows and the script.

TOGETHER = Place((0, 1), (0, 1))  # two devices that act and learn
ONE_PROGRAM = (Place(), Place(updates_per_call=1), Place(env_threads=2, updates_per_call=5))
COLOCATED = (TOGETHER, Place(), TOGETHER._replace(env_threads=2))
ANYWHERE = (TOGETHER, Place(), Place((1,), (0,)), Place((0,), (0, 1)),
            Place(actors_per_device=2, env_threads=2))
SEVERAL_PROCESSES = (Place(processes=2), Place(env_threads=2, processes=2), TOGETHER)

CATCH = ('impala_catch', 'num_minibatches=1')
CARTPOLE = ('ppo_cartpole', 'num_minibatches=2', 'num_epochs=2')
SMALL_PONG = ('impala_atari:nature_cnn', 'env.task=Pong-v5', 'env.img_height=21',
              'env.img_width=21', 'network.channels=(8,16)', 'network.kernels=(4,3)',
              'network.strides=(4,1)', 'network.hidden=32', 'num_minibatches=1')
MUJOCO = ('network.hidden=(16,)', 'num_minibatches=2', 'num_epochs=2')  # observations normalised
DQN = ('apex_dqn_catch', 'replay.capacity=400', 'replay.min_size=80', 'replay.batch_size=16',
       'loss.target_every=7')
DPG = ('apex_dpg_walker_walk', 'replay.capacity=1000', 'replay.min_size=200',
       'replay.batch_size=16', 'replay.gradient_steps=2', 'loss.target_every=7',
       'network.actor_hidden=(16,)', 'network.critic_hidden=(16,)')
# The places and the experiment of each row: a config, and fields. Segments are short, or endless.
ROWS: dict[str, tuple[Sequence[Place], Sequence[str]]] = {
    'sync': (ANYWHERE, (*CATCH, 'scheme=sync', 'env.renew_every_updates=12')),
    'cleanba': (ANYWHERE, (*CATCH, 'scheme=cleanba', 'env.renew_every_updates=0')),
    'cleanba_pong': (ANYWHERE, (*SMALL_PONG, 'scheme=cleanba', 'env.renew_every_updates=20')),
    'fused': (ONE_PROGRAM, ('ppo_mujoco', *MUJOCO, 'env.renew_every_updates=10')),
    'fused_gymnax': (ONE_PROGRAM, (*CARTPOLE, 'env.task=gymnax:CartPole-v1',
                                   'env.renew_every_updates=16')),
    'fused_gru': (ONE_PROGRAM, ('impala_memory', 'network.hidden=(16,)', 'network.core_size=16',
                                'env.renew_every_updates=0')),
    'ppo': ((Place(), Place(env_threads=2)), (*CARTPOLE, 'scheme=ppo', 'network.core=lstm',
                                             'network.core_size=16', 'env.renew_every_updates=18')),
    'ddppo': (COLOCATED, ('ppo_mujoco_fast', *MUJOCO, 'env.task=Walker2d-v4', 'scheme=ddppo',
                          'env.renew_every_updates=8')),
    'dppo': (COLOCATED, (*CARTPOLE, 'env.task=gymnasium:CartPole-v1', 'scheme=dppo',
                         'env.renew_every_updates=0')),
    'rapid': (ANYWHERE, ('impala_cartpole', 'normalise.obs=True', 'scheme=rapid',
                         'env.renew_every_updates=14')),
    'apex_lockstep': (ANYWHERE, (*DQN, 'scheme=apex_lockstep', 'env.renew_every_updates=20')),
    'apex_dmc': (ANYWHERE, (*DPG, 'scheme=apex_lockstep', 'env.renew_every_updates=0')),
    'impala': ((Place((0, 1)),), (*CATCH, 'scheme=impala', 'env.renew_every_updates=12')),
    'rapid_async': ((TOGETHER,), (*CATCH, 'scheme=rapid_async', 'env.renew_every_updates=12')),
    'dppo_async': ((TOGETHER,), (*CARTPOLE, 'scheme=dppo_async', 'env.renew_every_updates=12')),
    'apex': ((Place((0, 1)),), (*DQN, 'scheme=apex', 'env.renew_every_updates=20')),
    'launch_process': (SEVERAL_PROCESSES, (*CATCH, 'scheme=cleanba',
                                           'env.renew_every_updates=12')),
    'launch_launcher': (SEVERAL_PROCESSES, (*CATCH, 'scheme=cleanba',
                                            'env.renew_every_updates=0')),
}
NUM_ENVS = 8
UNROLL_LENGTH = 5


def rows(updates: int) -> dict[str, Row]:
  """Returns the rows by name.

  Args:
    updates: approximate length of a run.
  """
  shared = [f'env.num_envs={NUM_ENVS}', f'unroll_length={UNROLL_LENGTH}', 'num_shards=2',
            'num_grad_shards=2', f'total_steps={updates * NUM_ENVS * UNROLL_LENGTH * 9 // 10}']
  return {name: Row(name, [f'--config={config}', *(f'--config.{field}' for field in [
              *shared, *fields])], places, name == 'launch_launcher')
          for name, (places, (config, *fields)) in ROWS.items()}


def resolved(row: Row, place: Place) -> Experiment:
  """Returns the experiment of a row, in a place."""
  return resolve(flags.parse(['', *row.flags(place)], FlagValues()))


def command(row: Row, place: Place, more_flags: Sequence[str], workdir: Workdir) -> list[str]:
  """Returns the command that begins a run, or goes on with it."""
  launch = ['launch', '-n', str(place.processes), '--'] if place.processes > 1 else []
  return [sys.executable, '-m', 'podracer_jit', *launch, *row.flags(place), *more_flags,
          f'--workdir={workdir.path}']


class Check:
  """Runs a row without and with stops, and compares the runs."""

  def __init__(self, row: Row, seed: int, root: Path, env: dict[str, str]):
    """Prepares a check.

    Args:
      row: the row to run.
      seed: the seed of all that is drawn.
      root: a folder for workdirs and logs.
      env: the environment of all processes.
    """
    self._row = row
    self._seed = seed
    self._root = root
    self._env = env
    self._processes = 0  # that were started, and not the first one, which is never stopped
    self._result = Result(row, [], [], [], '', False, [])

  def run(self, kills: int) -> Result:
    """Returns the result of so many stops."""
    result = self._result
    whole, expected = self._never_stopped()
    problem = whole.problem or problem_at_end(expected)
    if problem:
      return result._replace(verdict=f'the run that was never stopped: {problem}', failed=True)
    row = self._row
    print(f'{row.name}: never stopped, {last_update(expected.metrics)} updates in '
          f'{whole.seconds:.1f} s, the first after {whole.first_update_s:.1f} s', flush=True)
    deterministic = resolved(row, row.places[0]).deterministic
    run = 0
    left_over = 0
    while len(result.signals) < kills:
      workdir = Workdir(self._root / f'stopped{run}')
      problem = self._stopped(workdir, kills, whole)
      files = workdir.files()
      problem = problem or problem_at_end(files)
      if deterministic:
        problem = problem or difference(expected, files)
      if problem:
        return result._replace(verdict=f'{workdir.path.name}: {problem}', failed=True)
      left_over += len(files.drafts)
      run += 1
    if left_over:
      result.notes.append(
          f'{run} finished workdirs still have {left_over} incomplete checkpoints or files')
    return result._replace(verdict='identical' if deterministic else 'checkpoints kept')

  def _never_stopped(self) -> tuple[Ended, Files]:
    workdir = Workdir(self._root / 'whole')
    started = command(self._row, self._row.places[0], [], workdir)
    ended = live(Process(started, self._root / 'whole.log', self._env), workdir, None, 600)
    return ended, workdir.files()

  def _stopped(self, workdir: Workdir, kills: int, whole: Ended) -> str:
    """Makes a run in a new workdir, with stops; returns the problem, '' if there is none.

    Args:
      workdir: of the run.
      kills: stops of the row.
      whole: the end of the run that was never stopped.
    """
    row = self._row
    result = self._result
    begins = True
    while True:
      number = self._processes
      self._processes += 1
      rng = random.Random(f'{self._seed} {row.name} {number}')
      place = rng.choice(row.places)
      saves = draw_saves(rng)
      stop = None
      if len(result.signals) < kills:
        targets = 0 if row.signals_launcher or place.processes == 1 else place.processes
        stop = draw_stop(rng, number, targets, whole.first_update_s, whole.seconds)
      newest = workdir.files().newest
      process = Process(command(row, place, saves, workdir), self._root / f'{number}.log',
                        self._env)
      ended = live(process, workdir, stop, 60 + 5 * whole.seconds)
      resumed = going_on_from(ended.output)
      if not begins and resumed is not None:
        result.resumed_from.append(resumed)
      begins = False
      problem = ended.problem or resume_problem(ended.output, newest)
      if problem:
        return f'process {number}: {problem}'
      if ended.code == FINISHED:
        return ''
      result.signals.append(stop.signal)
      result.phases.append(ended.phase)
      files = workdir.files()
      print(f'{row.name}: stop {len(result.signals)} of {kills} ({stop.signal.name} {stop.event}) '
            f'after {ended.seconds:.2f} s while {ended.phase}; update '
            f'{last_update(files.metrics)}, checkpoint {files.newest}'
            + (f', went on from {resumed}' if resumed else ''), flush=True)


def print_table(results: Sequence[Result]) -> None:
  """Prints a line for each row, with its notes below."""
  names = [number.name.removeprefix('SIG') for number in SIGNALS]
  print(f'{"":16}{"stops":>6}' + ''.join(f'{name:>5}' for name in names)
        + ''.join(f'{phase:>10}' for phase in PHASES) + '  verdict; updates resumed from')
  for result in results:
    counts = ''.join(f'{result.signals.count(number):5}' for number in SIGNALS)
    counts += ''.join(f'{result.phases.count(phase):10}' for phase in PHASES)
    resumed = ' '.join(map(str, result.resumed_from))
    verdict = f'DIFFERENT: {result.verdict}' if result.failed else result.verdict
    print(f'{result.row.name:16}{len(result.signals):6}{counts}  {verdict}; {resumed}')
    for note in result.notes:
      print(f'{"":16}note: {note}')
  failed = sum(result.failed for result in results)
  stops = sum(len(result.signals) for result in results)
  print(f'{stops} stops, {len(results) - failed} of {len(results)} rows passed')


def environment(cache: Path, compile_soon: bool) -> dict[str, str]:
  """Returns the environment of all processes.

  Args:
    cache: a folder for compiled programs, which the processes share.
    compile_soon: whether XLA compiles faster, to slower programs.
  """
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': '1',
                      'XDG_CACHE_HOME': str(cache)}
  if compile_soon:
    env |= {'XLA_FLAGS': f'{COMPILED_SOON} {os.environ.get("XLA_FLAGS", "")}',
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
  return env


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rows', default=','.join(ROWS), help='rows, separated by commas')
  parser.add_argument('--kills', type=int, default=12, help='stops of each row')
  parser.add_argument('--seed', type=int, default=1, help='seed of all that is drawn')
  parser.add_argument('--updates', type=int, default=160, help='approximate length of a run')
  parser.add_argument('--workdirs', type=Path, help='a folder for workdirs and logs')
  parser.add_argument('--keep_workdirs', action='store_true',
                      help='keeps the workdirs even if all rows passed')
  parser.add_argument('--compile_soon', action='store_true',
                      help='uses the XLA flags of tests/flags.py, which halve the compile time')
  args = parser.parse_args(argv)
  names = args.rows.split(',')
  all_rows = rows(args.updates)
  unknown = [name for name in names if name not in all_rows]
  if unknown:
    print(f'--rows: unknown row {unknown[0]}; known are {", ".join(all_rows)}', file=sys.stderr)
    return 2
  # SIGTERM must unwind the stack, so that `finally` ends the training processes.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  if args.workdirs:
    args.workdirs.mkdir(parents=True, exist_ok=True)
  root = Path(tempfile.mkdtemp(prefix='kill_resume-', dir=args.workdirs))
  env = environment(root / 'compiled', args.compile_soon)
  results = []
  for name in names:
    (root / name).mkdir()
    result = Check(all_rows[name], args.seed, root / name, env).run(args.kills)
    results.append(result)
    print(f'{name}: {result.verdict}', flush=True)
    if not (result.failed or args.keep_workdirs):
      shutil.rmtree(root / name)
  print_table(results)
  failed = any(result.failed for result in results)
  if failed or args.keep_workdirs:
    print(f'workdirs and logs are in {root}')
  else:
    shutil.rmtree(root)
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
