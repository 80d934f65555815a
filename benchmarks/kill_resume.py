"""Kills runs by SIGKILL at random moments, resumes them, and checks that nothing is lost.

.venv/bin/python -m benchmarks.kill_resume [--schemes=sync,cleanba] [--kills=8] [--seed=1]

Each scheme trains a small experiment with short segments. An uninterrupted run gives the expected
receipts and the length of a whole run. A second run, by the same command, is killed at moments
drawn from --seed and started again until it has finished. Half of the moments are uniform in time,
from the start of the process. The others follow a write to the workdir (a checkpoint that begins, a
new checkpoint, a new line) by 0 to 20 ms. If a run finishes before it was killed often enough,
another one begins in a new workdir.

After each kill, the newest checkpoint must still be in the workdir, and the updates of
metrics.jsonl and receipts.jsonl must be gapless. The next process must go on from that checkpoint.
A finished run must have each update once, in order; a deterministic scheme must have the receipts
and the metrics (but for times) of the uninterrupted run.

`launch_process` and `launch_launcher` are runs of two processes, of which a process or the launcher
is killed. Processes that lose their launcher must save and end.

Exit code: 0 all right, 1 something differs (the workdirs are kept then), 2 wrong arguments.
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

from absl import flags

from podracer_jit.run import command_line
from podracer_jit.run.resolve import resolve
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES
from tests.flags import COMPILED_SOON

EVERY_UPDATES = 8  # of a segment
POLL_S = 0.002
MAX_DELAY_S = 0.02  # between a write and the kill
ORPHAN_GRACE_S = 60.0  # processes may outlive their launcher by this, as they save first
PHASES = ('starting', 'compiling', 'training', 'writing')
EVENTS = ('draft', 'checkpoint', 'line')  # the writes that a kill may follow
TIMES = {'sps', 'elapsed_s', 'actor_wait_s', 'learner_wait_s', 'samples_per_s'}  # in metrics.jsonl


class Row(NamedTuple):
  """An experiment, and how it is run."""

  name: str
  args: list[str]  # the flags of training, without --workdir
  processes: int = 1
  kills_launcher: bool = False

  def command(self, workdir: Path) -> list[str]:
    """Returns the command that starts the run and the one that resumes it: they are the same."""
    launch = ['launch', '-n', str(self.processes), '--'] if self.processes > 1 else []
    return [sys.executable, '-m', 'podracer_jit', *launch, *self.args, f'--workdir={workdir}']


class Moment(NamedTuple):
  """When to kill: after some seconds, or after a write."""

  event: str  # of EVENTS, or 'time'
  count: int  # kill after this many such events
  delay_s: float  # after the event; of 'time', after the start of the process


class Files(NamedTuple):
  """What a workdir holds."""

  metrics: str
  receipts: str
  checkpoints: list[int]  # whole ones, ascending
  drafts: set[str]  # checkpoints and files that are not whole


class Life(NamedTuple):
  """How a process ended."""

  code: int | None  # its exit code; None if it was killed
  phase: str  # of PHASES, when it was killed
  output: str
  problem: str  # '' if none
  seconds: float
  first_update_s: float  # from the start of the process to its first line


class Result(NamedTuple):
  """What became of a row."""

  row: Row
  phases: list[str]  # of each kill
  resumed_from: list[int]  # the update of each resumed process; 0: from the beginning
  verdict: str
  failed: bool
  notes: list[str]


# Checks of a workdir's files: functions of their text.


def parse(text: str) -> tuple[list[dict[str, Any]], list[int]]:
  """Returns the JSON objects of a file, and the numbers of the lines that are none, from 1.

  A last line that has no end counts as garbled, even if it can be read.
  """
  entries, garbled = [], []
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
  """Returns why the updates of a file are not 1, 2, 3 and so on; '' if they are.

  Args:
    text: of metrics.jsonl or receipts.jsonl.
    may_be_cut: whether the last line may be half a line, as a kill leaves it.
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
                'follows')
      continue
    if entry.get('update') != expected:
      return f'update {entry.get("update")} stands where update {expected} was expected'
    expected += 1
  return ''


def last_update(text: str) -> int:
  """Returns the last update of a file's whole lines; 0 if there is none."""
  return max((entry.get('update', 0) for entry in parse(text)[0]), default=0)


def problem_after_kill(files: Files, newest_before: int) -> str:
  """Returns what is wrong with a workdir whose process was just killed; '' if nothing.

  Args:
    files: of the workdir after the kill.
    newest_before: update of the newest checkpoint just before the kill; 0: none.
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
  """Returns what is wrong with the workdir of a finished run; '' if nothing."""
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
    return 'metrics.jsonl: steps do not grow with each update'
  return ''


def difference(expected: Files, files: Files) -> str:
  """Returns the first update of a run that is not as the uninterrupted run has it; '' if none."""
  def updates(text: str) -> list[dict[str, Any]]:
    return [entry for entry in parse(text)[0] if 'update' in entry]

  for name in ('receipts', 'metrics'):
    pair = [updates(getattr(f, name)) for f in (expected, files)]
    for one, two in zip(*pair, strict=False):
      fields = sorted(field for field in (one.keys() | two.keys()) - TIMES
                      if one.get(field) != two.get(field))
      if fields:
        return f'{name}.jsonl differs at update {one["update"]}: {", ".join(fields)}'
    if len(pair[0]) != len(pair[1]):
      return f'{name}.jsonl has {len(pair[1])} updates, {len(pair[0])} if nothing is killed'
  return ''


def resume_problem(output: str, newest: int) -> str:
  """Returns how a process went on from another update than that of the newest checkpoint.

  Args:
    output: of the process; it may have been killed before it said anything.
    newest: update of the newest checkpoint before it started; 0: none.
  """
  resumed = going_on_from(output)
  if resumed is not None and resumed != newest:
    return f'it went on from update {resumed}, the newest checkpoint was that of {newest}'
  return ''


def going_on_from(output: str) -> int | None:
  """Returns the update that a process says it goes on from; 0: the first; None: it says nothing."""
  match = re.search(r'going on from update (\d+)', output)
  if match:
    return int(match[1])
  return 0 if re.search(r': starting$', output, re.MULTILINE) else None


def phase_of_kill(output: str, before: Files, after: Files) -> str:
  """Returns what a process was at when it was killed.

  Args:
    output: of the process.
    before: the workdir's files when it started.
    after: and when it was dead.
  """
  texts = (after.metrics, after.receipts)
  half_line = any(text and not text.endswith('\n') for text in texts)
  if after.drafts - before.drafts or half_line or last_update(texts[0]) != last_update(texts[1]):
    return 'writing'
  if going_on_from(output) is None:
    return 'starting'
  # Until its first update, a segment compiles the program of its rollouts. What an earlier process
  # wrote after the checkpoint is in the files until then.
  if texts == (before.metrics, before.receipts):
    return 'compiling'
  return 'training' if last_update(texts[0]) > max(after.checkpoints, default=0) else 'compiling'


def draw_moment(rng: random.Random, number: int, first_update_s: float, whole_s: float) -> Moment:
  """Draws when to kill.

  Args:
    rng: the generator to draw from.
    number: of the kill; even ones are uniform in time, odd ones follow a write.
    first_update_s: from the start of an uninterrupted process to its first update.
    whole_s: from its start to its end.
  """
  if number % 2 == 0:
    # Half of the training, so that the run goes on over several kills.
    return Moment('time', 0, rng.uniform(0, (first_update_s + whole_s) / 2))
  event = rng.choice((*EVENTS, 'line'))  # most of the time is not training but compiling
  count = rng.randint(1, 2 * EVERY_UPDATES if event == 'line' else 2)
  return Moment(event, count, rng.uniform(0, MAX_DELAY_S))


# Processes and their workdirs.


class Workdir(NamedTuple):
  """A workdir, which need not exist yet."""

  path: Path
  needs_manifest: bool  # whether a whole checkpoint has a manifest.json, which is written last

  @property
  def folder(self) -> Path:
    """The folder of its checkpoints."""
    return self.path / 'checkpoints'

  def whole_checkpoints(self) -> list[int]:
    """Returns the updates of the whole checkpoints, ascending; Orbax renames whole folders."""
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    updates = sorted(int(name) for name in names if name.isdigit())
    if not self.needs_manifest:
      return updates
    return [n for n in updates if (self.folder / str(n) / 'manifest.json').exists()]

  def newest(self) -> int:
    """Returns the update of the newest whole checkpoint; 0 if there is none."""
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
  """Returns the processes that process `pid` started and that have not ended."""
  children = []
  for path in Path('/proc').glob('[0-9]*/stat'):
    try:
      state, parent = path.read_text().rpartition(') ')[2].split()[:2]
    except OSError:
      continue  # it has ended meanwhile
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
  """Counts the writes to a workdir since it was made."""

  def __init__(self, workdir: Path):
    self._workdir = workdir
    self._seen = {event: self._state(event) for event in EVENTS}
    self.counts = collections.Counter()

  def _state(self, event: str) -> Any:
    folder = self._workdir / 'checkpoints'
    if event == 'line':
      paths = [self._workdir / name for name in ('metrics.jsonl', 'receipts.jsonl')]
      return [path.stat().st_size if path.exists() else 0 for path in paths]
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.isdigit() == (event == 'checkpoint')}

  def look(self) -> None:
    """Looks at the workdir and counts what is new since the last look."""
    for event in EVENTS:
      try:
        state = self._state(event)
      except FileNotFoundError:  # it was replaced between two calls
        continue
      before, self._seen[event] = self._seen[event], state
      if event == 'line':
        self.counts[event] += any(a > b for a, b in zip(state, before, strict=True))
      else:
        self.counts[event] += len(state - before)


def live(row: Row, workdir: Workdir, log: Path, env: dict[str, str], moment: Moment | None,
         rng: random.Random, limit_s: float) -> Life:
  """Starts a run or resumes it; kills it at the moment, or waits until it ends.

  Args:
    row: what to run.
    workdir: of the run.
    log: a file for what the process prints.
    env: its environment.
    moment: when to kill it; None: never.
    rng: draws which of several processes is killed.
    limit_s: a process that takes longer hangs, which is a problem.
  """
  before, watch, start = workdir.files(), Watch(workdir.path), time.monotonic()
  first_update_s, due_s = 0.0, None
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
        after, output = workdir.files(), log.read_text(errors='replace')
        problem = problem or problem_after_kill(after, newest_before)
        return Life(None, phase_of_kill(output, before, after), output, problem, passed_s,
                    first_update_s)
      if passed_s > limit_s:
        return Life(None, 'training', log.read_text(errors='replace'),
                    f'it had not ended after {limit_s:.0f} s', passed_s, first_update_s)
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

  Returns:
    What went wrong; '' if nothing.
  """
  if row.processes == 1:
    kill(process.pid)
    process.wait()
    return ''
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
    return 'the launcher goes on 60 s after one of its processes was killed'
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
  """Returns the last line of an output that is not empty."""
  return next((line for line in reversed(output.splitlines()) if line.strip()), 'no output')


# Rows and the script.


def rows(updates: int) -> dict[str, Row]:
  """Returns an experiment for each scheme, and for runs of two processes.

  Args:
    updates: of a whole run, about.
  """
  all_rows = {name: Row(name, scheme_args(name, scheme, updates))
              for name, scheme in SCHEMES.items()}
  for name, kills_launcher in (('launch_process', False), ('launch_launcher', True)):
    args = [*rollout_args('impala_catch', updates), '--config.scheme=cleanba']
    all_rows[name] = Row(name, args, 2, kills_launcher)
  return all_rows


def scheme_args(name: str, scheme: Scheme, updates: int) -> list[str]:
  """Returns the flags of a small experiment with a scheme, on two devices where it takes them."""
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
  """Returns the flags of a shipped config that make its updates short and about so many."""
  num_envs, unroll_length = 8, 5
  return [f'--config={config}', f'--config.env.num_envs={num_envs}',
          f'--config.unroll_length={unroll_length}', '--config.num_shards=2',
          '--config.num_grad_shards=2', '--config.placement.env_threads=1',
          f'--config.checkpoint.every_updates={EVERY_UPDATES}',
          f'--config.total_steps={updates * num_envs * unroll_length * 9 // 10}']


def is_deterministic(row: Row) -> bool:
  """Returns whether all runs of a row's experiment have the same bits."""
  return resolve(command_line.parse(['', *row.args], flags.FlagValues())).deterministic


def check(row: Row, kills: int, seed: int, root: Path, env: dict[str, str]) -> Result:
  """Runs a row uninterrupted and killed, and compares.

  Args:
    row: what to run.
    kills: how many processes to kill.
    seed: of the moments.
    root: a folder for workdirs and logs.
    env: the environment of all processes.
  """
  rng = random.Random(f'{seed} {row.name}')
  phases, resumed_from, notes = [], [], []

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
  # Processes that lose their launcher save at their next update, where other segments then end.
  deterministic = is_deterministic(row) and not row.kills_launcher
  run, left_over = 0, 0
  while len(phases) < kills:
    workdir, processes = Workdir(root / f'killed{run}', manifests), 0
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
              + (f', went on from {resumed}' if resumed else ''), flush=True)
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
    notes.append(f'{left_over} interrupted checkpoints or files stayed in {run} finished workdirs')
  return result('identical' if deterministic else 'checkpoints kept', False)


def print_table(results: Sequence[Result]) -> None:
  """Prints a line for each row, its notes below it."""
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
  print(f'{kills} kills, {len(results) - failed} of {len(results)} rows are as they must be')


def environment(cache: Path, compile_soon: bool) -> dict[str, str]:
  """Returns the environment of all processes; they share compiled programs under `cache`."""
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
  parser.add_argument('--schemes', default=','.join(rows(1)), help='by comma')
  parser.add_argument('--kills', type=int, default=8, help='of each scheme')
  parser.add_argument('--seed', type=int, default=1, help='of the moments of the kills')
  parser.add_argument('--updates', type=int, default=64, help='of a whole run, about')
  parser.add_argument('--workdirs', type=Path, help='a folder for workdirs and logs')
  parser.add_argument('--keep_workdirs', action='store_true', help='also if nothing differs')
  parser.add_argument('--compile_soon', action='store_true',
                      help='with the flags of tests/flags.py, which halve the time to compile')
  args = parser.parse_args(argv)
  names, all_rows = args.schemes.split(','), rows(args.updates)
  unknown = [name for name in names if name not in all_rows]
  if unknown:
    print(f'--schemes: there is no {unknown[0]}; there are {", ".join(all_rows)}', file=sys.stderr)
    return 2
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what ends the processes
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
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
