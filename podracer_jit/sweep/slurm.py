"""Trains members of a sweep as an array of SLURM: one task for each member.

The files are in OUT/slurm. Each command submits what is neither finished nor under way, and reads
what the tasks of earlier arrays have left.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from podracer_jit.errors import FINISHED, STOPPED, Refused
from podracer_jit.runtime import children
from podracer_jit.sweep.folder import Folder
from podracer_jit.sweep.local import LOGS, last_line, log_of
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.training import STOPPED_BY_A_SIGNAL
from podracer_jit.workdir import files

_FOLDER = 'slurm'
_SCRIPT = """#!/bin/bash
{options}
#SBATCH --array=0-{last}{at_once}
#SBATCH --output=/dev/null
#SBATCH --requeue
# Before the time limit the member gets SIGTERM, at which it saves.
#SBATCH --signal=TERM@120

names=(
{names}
)
commands=(
{commands}
)
name=${{names[$SLURM_ARRAY_TASK_ID]}}
# From version 22.05 to 23.02 srun does not take this from sbatch, and refuses an empty value.
if [ -n "${{SLURM_CPUS_PER_TASK-}}" ]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
code=0
eval "srun --ntasks=1 ${{commands[$SLURM_ARRAY_TASK_ID]}}" >> {logs}/"$name".log 2>&1 || code=$?
echo "$code" > {folder}/"$name".code
# {stopped}: stopped by a signal, and saved. The same command goes on.
if (( code == {stopped} )); then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
"""


class Array:
  """Members as tasks of arrays."""

  def __init__(self, folder: Folder, options: str):
    """Reads what earlier arrays have left.

    Args:
      folder: of the sweep; receives what became of members.
      options: of sbatch, such as '--partition=cpu --cpus-per-task=4'.
    """
    self._folder = folder
    self._options = shlex.split(options)
    self._files = folder.path.resolve() / _FOLDER
    self._logs = folder.path.resolve() / LOGS

  def collect(self, members: Sequence[Member]) -> None:
    """Notes which members have finished or failed."""
    for member in members:
      with contextlib.suppress(OSError, ValueError):
        path = self._code_of(member)
        code = int(path.read_text())
        if code == FINISHED:
          self._folder.finished(member)
        elif code not in STOPPED_BY_A_SIGNAL:
          self._folder.failed(member, last_line(log_of(self._folder.path, member))
                              or f'ended with exit code {code}')
        if not self._folder.is_dry:
          files.remove(path)

  def under_way(self) -> set[str]:
    """Returns the names of members that wait or run, as SLURM says.

    Raises:
      Refused: SLURM does not answer.
    """
    names: set[str] = set()
    for path in self._files.glob('*.names'):
      listed = path.read_text().split('\n')
      # A job that has ended some time ago is unknown.
      tasks = _output(['squeue', '--noheader', '--array', f'--jobs={path.stem}', '--format=%K'],
                      accepted='Invalid job id specified').split()
      names |= {listed[int(task)] for task in tasks if task.isdecimal()}
    return names

  def submit(self, members: Sequence[Member], at_once: int | None) -> str:
    """Submits an array; returns the number of the job.

    Args:
      members: its tasks.
      at_once: most tasks at once; None: as many as SLURM lets run.

    Raises:
      Refused: SLURM does not take it; the message is SLURM's.
      OSError: the script cannot be written.
    """
    for folder in (self._files, self._logs):
      files.make_folder(folder)
    out = self._folder.path.resolve()
    commands = [shlex.join([*children.python(), '-m', *member.command(out)]) for member in members]
    script = self._files / 'array.sh'
    files.write(script, _SCRIPT.format(
        options=f'#SBATCH {shlex.join(self._options)}' if self._options else '',
        last=len(members) - 1, at_once=f'%{at_once}' if at_once else '',
        names='\n'.join(shlex.quote(member.name) for member in members),
        commands='\n'.join(map(shlex.quote, commands)),
        logs=shlex.quote(str(self._logs)), folder=shlex.quote(str(self._files)), stopped=STOPPED))
    job = re.search(r'\d+', _output(['sbatch', '--parsable', str(script)]))
    if job is None:
      raise Refused('--slurm: sbatch printed no number of a job')
    files.write(self._files / f'{job[0]}.names', '\n'.join(member.name for member in members))
    return job[0]

  def _code_of(self, member: Member) -> Path:
    return self._files / f'{member.name}.code'


def _output(command: Sequence[str], accepted: str | None = None) -> str:
  """Returns what a command of SLURM prints.

  Args:
    command: the command.
    accepted: words of an error that is none.

  Raises:
    Refused: there is no such command, or it fails.
  """
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
  except FileNotFoundError:
    raise Refused(f'--slurm: this machine has no {command[0]}') from None
  if done.returncode and (accepted is None or accepted not in done.stderr):
    words = ' '.join(done.stderr.split())[:300]
    raise Refused(f'--slurm: {command[0]}: {words or f"exit code {done.returncode}"}')
  return done.stdout
