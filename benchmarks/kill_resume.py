"""Kills runs by SIGKILL at random moments, resumes them, and checks that nothing is lost.

.venv/bin/python -m benchmarks.kill_resume [--schemes=sync,cleanba] [--kills=8] [--seed=1]

Each scheme trains a small experiment with short segments. An uninterrupted run gives the expected
receipts and the length of a whole run. A second run, by the same command, is killed at moments
drawn from --seed and started again until it has finished. Half of the moments are uniform in time,
from the start of the process. The others follow a write to the workdir (a checkpoint that begins, a
new checkpoint, a new line) by 0 to 20 ms. If a run finishes before all its kills were made, another
run begins in a new workdir.

After each kill, the newest checkpoint must still be in the workdir, and the updates of
metrics.jsonl and receipts.jsonl must be gapless. The next process must resume from that checkpoint.
A finished run must have each update once, in order. With a deterministic scheme, its receipts and
metrics (except times) must equal those of the uninterrupted run.

`launch_process` and `launch_launcher` are runs of two processes. A kill hits one of the processes
or the launcher. Processes without their launcher must save a checkpoint and end.

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

from podracer_jit.experiment import flags
from podracer_jit.experiment.resolve import resolve
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES
from tests.flags import COMPILED_SOON

EVERY_UPDATES = 8  # of a segment
POLL_S = 0.002
MAX_DELAY_S = 0.02  # between a write and the kill
ORPHAN_GRACE_S = 60.0  # processes may outlive their launcher by this, since they save first
PHASES = ('starting', 'compiling', 'training', 'writing')
EVENTS = ('draft', 'checkpoint', 'line')  # the writes that a kill may follow
# In metrics.jsonl.
TIMES = {'sps', 'elapsed_s', 'wall_s', 'actor_wait_s', 'learner_wait_s', 'samples_per_s'}


class Row(NamedTuple):
  """An experiment and the processes that run it: a row of the result table."""

  name: str
  args: list[str]  # the flags of training, without --workdir
  processes: int = 1
  kills_launcher: bool = False

  def command(self, workdir: Path) -> list[str]:
    """Returns the command that starts the run; the same command resumes it."""
    launch = ['launch', '-n', str(self.processes), '--'] if self.processes > 1 else []
    return [sys.executable, '-m', 'podracer_jit', *launch, *self.args, f'--workdir={workdir}']


class Moment(NamedTuple):
  """The time of a kill: a delay after the start of the process, or after a write."""

  event: str  # of EVENTS, or 'time'
  count: int  # the delay begins after this many events; unused for 'time'
  delay_s: float


class Files(NamedTuple):
  """The contents of a workdir."""

  metrics: str  # text of metrics.jsonl
  receipts: str  # text of receipts.jsonl
  checkpoints: list[int]  # updates of the complete checkpoints, ascending
  drafts: set[str]  # names of incomplete checkpoints and files


class Life(NamedTuple):
  """The end of a process."""

  code: int | None  # its exit code; None if it was killed
  phase: str  # of PHASES, when it was killed
  output: str
  problem: str  # '' if none
  seconds: float
  first_update_s: float  # from the start of the process to its first line


class Result(NamedTuple):
  """The result of a row."""

  row: Row
  phases: list[str]  # the phase of each kill
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


def problem_after_kill(files: Files, newest_before: int) -> str:
  """Checks a workdir whose process was just killed.

  Args:
    files: the files of the workdir after the kill.
    newest_before: update of the newest checkpoint just before the kill; 0: none.

  Returns:
    The problem; '' if there is none.
  """
  newest = max(files.checkpoints, default=0)
  if newest < newest_before:
    return f'the checkpoint of update {newest_before} is gone; the newest is that of {newest}'
  for name, text in (('metrics', files.metrics), ('receipts', files.receipts)):
    problem = order_problem(text, may_be_cut=True)
    if problem:
      return f'{name}.jsonl: {problem}'
    if last_update(text) < newest:
      return (f'{name}.jsonl ends with update {last_update(text)}, before the checkpoint of '
              f'{newest}')
  return ''


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
  newest = max(files.checkpoints, default=0)
  if newest != last:
    return f'the newest checkpoint is that of update {newest}, the last update is {last}'
  steps = [entry['steps'] for entry in parse(files.metrics)[0]]
  if any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
    return 'metrics.jsonl: steps do not increase with each update'
  return ''


def difference(expected: Files, files: Files) -> str:
  """Returns the first difference of a run from the uninterrupted run; '' if there is none."""
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
      return (f'{name}.jsonl has {len(entries)} updates, {len(expected_entries)} in the '
              'uninterrupted run')
  return ''


def resume_problem(output: str, newest: int) -> str:
  """Checks that a process resumed from the newest checkpoint.

  Args:
    output: the output of the process. A process that was killed before it printed its start has no
      problem.
    newest: update of the newest checkpoint before it started; 0: none.

  Returns:
    The problem; '' if there is none.
  """
  resumed = going_on_from(output)
  if resumed is not None and resumed != newest:
    return f'it resumed from update {resumed}, the newest checkpoint was that of {newest}'
  return ''


def going_on_from(output: str) -> int | None:
  """Returns the update that a process resumed from; 0 for a new run; None if it printed neither."""
  match = re.search(r'going on from update (\d+)', output)
  if match:
    return int(match[1])
  return 0 if re.search(r': starting$', output, re.MULTILINE) else None


def phase_of_kill(output: str, before: Files, after: Files) -> str:
  """Returns the phase of PHASES in which a process was killed.

  Args:
    output: the output of the process.
    before: the workdir's files when it started.
    after: the workdir's files after the kill.
  """
  texts = (after.metrics, after.receipts)
  half_line = any(text and not text.endswith('\n') for text in texts)
  if after.drafts - before.drafts or half_line or last_update(texts[0]) != last_update(texts[1]):
    return 'writing'
  if going_on_from(output) is None:
    return 'starting'
  # Until its first update, a segment compiles the rollout program. Until then, the files also keep
  # the lines that an earlier process wrote after the checkpoint.
  if texts == (before.metrics, before.receipts):
    return 'compiling'
  return 'training' if last_update(texts[0]) > max(after.checkpoints, default=0) else 'compiling'


def draw_moment(rng: random.Random, number: int, first_update_s: float, whole_s: float) -> Moment:
  """Draws the moment of a kill.

  Args:
    rng: the generator to draw from.
    number: the number of the kill; even kills are uniform in time, odd kills follow a write.
    first_update_s: seconds from the start of an uninterrupted process to its first update.
    whole_s: seconds from its start to its end.
  """
  if number % 2 == 0:
    # The moment is in the first half of the training, so that a run lives through several kills.
    return Moment('time', 0, rng.uniform(0, (first_update_s + whole_s) / 2))
  # 'line' is twice as likely: kills uniform in time mostly hit the compilation, not the training.
  event = rng.choice((*EVENTS, 'line'))
  count = rng.randint(1, 2 * EVERY_UPDATES if event == 'line' else 2)
  return Moment(event, count, rng.uniform(0, MAX_DELAY_S))


# Processes and their workdirs.


class Workdir(NamedTuple):
  """A workdir, which need not exist yet."""

  path: Path
  needs_manifest: bool  # whether a complete checkpoint has a manifest.json, which is written last

  @property
  def folder(self) -> Path:
    """Folder of the checkpoints."""
    return self.path / 'checkpoints'

  def whole_checkpoints(self) -> list[int]:
    """Returns the updates of the complete checkpoints, ascending."""
    # Orbax writes to a temporary name and renames the folder when it is complete.
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    updates = sorted(int(name) for name in names if name.isdigit())
    if not self.needs_manifest:
      return updates
    return [n for n in updates if (self.folder / str(n) / 'manifest.json').exists()]

  def newest(self) -> int:
    """Returns the update of the newest complete checkpoint; 0 if there is none."""
    return max(self.whole_checkpoints(), default=0)

  def files(self) -> Files:
    """Reads the workdir."""
    def text(name: str) -> str:
      path = self.path / name
      return path.read_text(errors='replace') if path.exists() else ''

    whole = self.whole_checkpoints()
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    drafts = {name for name in names if not (name.isdigit() and int(name) in whole)}
    drafts |= {path.name for path in self.path.glob('*.tmp')}
    return Files(text('metrics.jsonl'), text('receipts.jsonl'), whole, drafts)


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


def alive(pid: int) -> bool:
  """Returns whether a process exists and is no zombie."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2].split()[0] != 'Z'
  except OSError:
    return False


def kill(pid: int) -> None:
  """Sends SIGKILL to a process, which may have ended."""
  try:
    os.kill(pid, signal.SIGKILL)
  except ProcessLookupError:
    pass


class Watch:
  """Counts the writes to a workdir since the watch began."""

  def __init__(self, workdir: Path):
    self._workdir = workdir
    self._last_states = {event: self._state(event) for event in EVENTS}
    self.counts = collections.Counter()

  def _state(self, event: str) -> Any:
    """Returns the file sizes of 'line', or the folder names of 'draft' and 'checkpoint'."""
    folder = self._workdir / 'checkpoints'
    if event == 'line':
      paths = [self._workdir / name for name in ('metrics.jsonl', 'receipts.jsonl')]
      return [path.stat().st_size if path.exists() else 0 for path in paths]
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
        self.counts[event] += any(a > b for a, b in zip(state, before, strict=True))
      else:
        self.counts[event] += len(state - before)


def live(row: Row, workdir: Workdir, log: Path, env: dict[str, str], moment: Moment | None,
         rng: random.Random, limit_s: float) -> Life:
  """Starts or resumes a run; kills it at the moment, or waits until it ends.

  Args:
    row: the row to run.
    workdir: the workdir of the run.
    log: a file for the output of the process.
    env: the environment of the process.
    moment: when to kill it; None: never.
    rng: draws which of several processes is killed.
    limit_s: a process that takes longer counts as hanging, which is a problem.

  Returns:
    The end of the process, with the problem if there is one.
  """
  before = workdir.files()
  watch = Watch(workdir.path)
  start = time.monotonic()
  first_update_s = 0.0
  due_s = None  # seconds after the start; known once the event of the moment has happened
  with log.open('w') as file:
    process = subprocess.Popen(row.command(workdir.path), stdin=subprocess.DEVNULL, stdout=file,
                               stderr=subprocess.STDOUT, env=env)
  if moment and moment.event == 'time':
    due_s = moment.delay_s
  try:
    while process.poll() is None:
      passed_s = time.monotonic() - start
      watch.look()
      if not first_update_s and watch.counts['line']:
        first_update_s = passed_s
      if moment and due_s is None and watch.counts[moment.event] >= moment.count:
        due_s = passed_s + moment.delay_s

      if due_s is not None and passed_s >= due_s:
        newest_before = workdir.newest()
        problem = kill_run(row, process, rng)
        after = workdir.files()
        output = log.read_text(errors='replace')
        problem = problem or problem_after_kill(after, newest_before)
        return Life(None, phase_of_kill(output, before, after), output, problem, passed_s,
                    first_update_s)
      if passed_s > limit_s:
        return Life(None, 'training', log.read_text(errors='replace'),
                    f'it had not ended after {limit_s:.0f} s', passed_s, first_update_s)

      # Delays are as short as MAX_DELAY_S, so shortly before a kill the loop turns faster.
      near = due_s is not None and due_s - passed_s < 10 * POLL_S
      time.sleep(POLL_S / 4 if near else POLL_S)
  finally:
    for pid in [*children_of(process.pid), process.pid]:
      kill(pid)
    process.wait()
  output = log.read_text(errors='replace')
  problem = f'exit code {process.returncode}: {last_line(output)}' if process.returncode else ''
  return Life(process.returncode, '', output, problem, time.monotonic() - start, first_update_s)


def kill_run(row: Row, process: subprocess.Popen, rng: random.Random) -> str:
  """Kills a run, or one of its processes; returns once all of them have ended.

  Args:
    row: the row of the run.
    process: the run's process, or its launcher.
    rng: draws which process of several is killed.

  Returns:
    The problem; '' if there is none.
  """
  if row.processes == 1:
    kill(process.pid)
    process.wait()
    return ''

  # Wait until the launcher has started all of its processes, then kill one or the launcher.
  deadline = time.monotonic() + 30
  children = children_of(process.pid)
  while len(children) < row.processes and process.poll() is None:
    if time.monotonic() > deadline:
      return 'the launcher has not started its processes after 30 s'
    time.sleep(POLL_S)
    children = children_of(process.pid)
  kill(process.pid if row.kills_launcher else rng.choice(children))
  try:
    process.wait(60)
  except subprocess.TimeoutExpired:
    return 'the launcher still runs 60 s after one of its processes was killed'

  # Processes that lost their launcher may save first. Those that take too long are a problem, but
  # must not disturb the next run.
  deadline = time.monotonic() + ORPHAN_GRACE_S
  while any(map(alive, children)) and time.monotonic() < deadline:
    time.sleep(0.05)
  orphans = [pid for pid in children if alive(pid)]
  for pid in orphans:
    kill(pid)
  while any(map(alive, orphans)):
    time.sleep(0.05)
  if orphans:
    return (f'{len(orphans)} of {len(children)} processes were alive {ORPHAN_GRACE_S:.0f} s after '
            'their launcher')
  return ''


def last_line(output: str) -> str:
  """Returns the last line of an output that has text; 'no output' if there is none."""
  return next((line for line in reversed(output.splitlines()) if line.strip()), 'no output')


# Rows and the script.


def rows(updates: int) -> dict[str, Row]:
  """Returns the rows by name: one for each scheme, and two for runs of two processes.

  Args:
    updates: approximate length of a run.
  """
  all_rows = {name: Row(name, scheme_args(name, scheme, updates))
              for name, scheme in SCHEMES.items()}
  for name, kills_launcher in (('launch_process', False), ('launch_launcher', True)):
    args = [*rollout_args('impala_catch', updates), '--config.scheme=cleanba']
    all_rows[name] = Row(name, args, 2, kills_launcher)
  return all_rows


def scheme_args(name: str, scheme: Scheme, updates: int) -> list[str]:
  """Returns the flags of a small experiment, on two devices if the scheme supports them.

  Args:
    name: the name of the scheme.
    scheme: its entry in SCHEMES.
    updates: approximate length of a run.
  """
  if scheme.replay:
    args = rollout_args('apex_dqn_catch', updates)
    args += ['--config.replay.capacity=400', '--config.replay.min_size=80',
             '--config.replay.batch_size=16', '--config.loss.target_every=7']
  elif scheme.lag is None or scheme.lag == 1 or name == 'sync':
    args = rollout_args('impala_catch', updates)
  else:
    args = rollout_args('ppo_cartpole', updates)
    args += ['--config.num_minibatches=2', '--config.num_epochs=2']
  actors = learners = '(0,)'
  if scheme.colocated or scheme.graph.separate_updates:
    actors = learners = '(0,1)'
  elif scheme.lag is None:
    actors = '(0,1)'
  return [*args, f'--config.scheme={name}', f'--config.placement.actor_devices={actors}',
          f'--config.placement.learner_devices={learners}']


def rollout_args(config: str, updates: int) -> list[str]:
  """Returns the flags of a shipped config with short updates, about so many of them."""
  num_envs = 8
  unroll_length = 5
  return [f'--config={config}', f'--config.env.num_envs={num_envs}',
          f'--config.unroll_length={unroll_length}', '--config.num_shards=2',
          '--config.num_grad_shards=2', '--config.placement.env_threads=1',
          f'--config.checkpoint.every_updates={EVERY_UPDATES}',
          f'--config.total_steps={updates * num_envs * unroll_length * 9 // 10}']


def is_deterministic(row: Row) -> bool:
  """Returns whether all runs of a row's experiment give the same bits."""
  return resolve(flags.parse(['', *row.args], FlagValues())).deterministic


def check(row: Row, kills: int, seed: int, root: Path, env: dict[str, str]) -> Result:
  """Runs a row once uninterrupted and then with kills, and compares the runs.

  Args:
    row: the row to run.
    kills: number of processes to kill.
    seed: the seed of the moments.
    root: a folder for workdirs and logs.
    env: the environment of all processes.
  """
  rng = random.Random(f'{seed} {row.name}')
  phases = []
  resumed_from = []
  notes = []

  def result(verdict: str, failed: bool) -> Result:
    return Result(row, phases, resumed_from, verdict, failed, notes)

  reference = Workdir(root / 'whole', False)
  whole = live(row, reference, root / 'whole.log', env, None, rng, 600)
  expected = reference.files()
  problem = whole.problem or problem_at_end(expected)
  if problem:
    return result(f'the uninterrupted run: {problem}', True)
  print(f'{row.name}: uninterrupted, {last_update(expected.metrics)} updates in '
        f'{whole.seconds:.1f} s, the first after {whole.first_update_s:.1f} s', flush=True)
  manifests = any(reference.folder.glob('*/manifest.json'))
  # Processes that lose their launcher save at their next update. A segment then ends at an update
  # where it would not end otherwise, and the receipts differ.
  deterministic = is_deterministic(row) and not row.kills_launcher
  run = 0
  left_over = 0
  while len(phases) < kills:
    workdir = Workdir(root / f'killed{run}', manifests)
    processes = 0
    while True:
      moment = None
      if len(phases) < kills:
        moment = draw_moment(rng, len(phases), whole.first_update_s, whole.seconds)
      newest = workdir.newest()
      log = root / f'killed{run}.{processes}.log'
      life = live(row, workdir, log, env, moment, rng, 60 + 5 * whole.seconds)
      resumed = going_on_from(life.output)
      if processes and resumed is not None:
        resumed_from.append(resumed)
      if life.code is None:
        phases.append(life.phase)
        files = workdir.files()
        print(f'{row.name}: kill {len(phases)} of {kills} ({moment.event if moment else "hangs"}) '
              f'after {life.seconds:.2f} s while {life.phase}; update '
              f'{last_update(files.metrics)}, checkpoint {max(files.checkpoints, default=0)}'
              + (f', resumed from {resumed}' if resumed else ''), flush=True)
      problem = life.problem or resume_problem(life.output, newest)
      if problem:
        return result(f'{workdir.path.name}, process {processes}: {problem}', True)
      processes += 1
      if life.code == 0:
        break

    files = workdir.files()
    left_over += len(files.drafts)
    problem = problem_at_end(files) or (difference(expected, files) if deterministic else '')
    if problem:
      return result(f'{workdir.path.name}: {problem}', True)
    run += 1
  if left_over:
    notes.append(f'{run} finished workdirs still have {left_over} incomplete checkpoints or files')
  return result('identical' if deterministic else 'checkpoints kept', False)


def print_table(results: Sequence[Result]) -> None:
  """Prints a line for each row, with its notes below."""
  print(f'{"":16}{"kills":>6}' + ''.join(f'{phase:>10}' for phase in PHASES)
        + '  verdict; updates resumed from')
  for result in results:
    counts = ''.join(f'{result.phases.count(phase):10}' for phase in PHASES)
    resumed = ' '.join(map(str, result.resumed_from))
    verdict = f'DIFFERENT: {result.verdict}' if result.failed else result.verdict
    print(f'{result.row.name:16}{len(result.phases):6}{counts}  {verdict}; {resumed}')
    for note, count in collections.Counter(result.notes).items():
      print(f'{"":16}note: {note}' + (f' ({count} times)' if count > 1 else ''))
  failed = sum(result.failed for result in results)
  kills = sum(len(result.phases) for result in results)
  print(f'{kills} kills, {len(results) - failed} of {len(results)} rows passed')


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
  parser.add_argument('--schemes', default=','.join(rows(1)), help='rows, separated by commas')
  parser.add_argument('--kills', type=int, default=8, help='kills of each row')
  parser.add_argument('--seed', type=int, default=1, help='seed of the moments of the kills')
  parser.add_argument('--updates', type=int, default=64, help='approximate length of a run')
  parser.add_argument('--workdirs', type=Path, help='a folder for workdirs and logs')
  parser.add_argument('--keep_workdirs', action='store_true',
                      help='keeps the workdirs even if all rows passed')
  parser.add_argument('--compile_soon', action='store_true',
                      help='uses the XLA flags of tests/flags.py, which halve the compile time')
  args = parser.parse_args(argv)
  names = args.schemes.split(',')
  all_rows = rows(args.updates)
  unknown = [name for name in names if name not in all_rows]
  if unknown:
    print(f'--schemes: unknown row {unknown[0]}; known are {", ".join(all_rows)}', file=sys.stderr)
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
    result = check(all_rows[name], args.kills, args.seed, root / name, env)
    results.append(result)
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
