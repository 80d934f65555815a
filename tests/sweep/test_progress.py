"""The table of a sweep in a terminal."""

import io
import json
import re
import sys

from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.members import Member
from podracer_jit.sweep.progress import Board, State
from podracer_jit.workdir import journal


class Terminal(io.StringIO):
  def isatty(self):
    return True


def replace_stdout(monkeypatch):
  for name, value in {'TERM': 'xterm', 'COLUMNS': '100', 'LINES': '60'}.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(sys, 'stdout', Terminal())
  return sys.stdout


def last_table(terminal):
  """Returns the words of each line of the table that stays."""
  text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', terminal.getvalue()).replace('\r', '\n')
  lines = [' '.join(line.split()) for line in text.split('\n')]
  first = max(i for i, line in enumerate(lines) if ' members: ' in line)
  return [line for line in lines[first:] if line]


def train(out, workdir, steps, sps, mean):
  (out / workdir).mkdir(parents=True)
  (out / workdir / journal.METRICS).write_text('\n'.join(json.dumps(
      dict(update=i, steps=steps * i, sps=sps, episode_return=mean)) for i in (1, 2)) + '\n{"upd')


def test_the_table_says_how_far_members_are(tmp_path, monkeypatch):
  terminal = replace_stdout(monkeypatch)
  names = ('waits', 'runs', 'failed', 'pruned', 'finished', 'stopped')
  members = {name: Member(name, 'x', {'seed': 1}) for name in names}
  members['runs'] = members['runs']._replace(num_seeds=2)
  train(tmp_path, 'runs/seed1', 500, 40.0, 10.0)
  train(tmp_path, 'runs/seed2', 600, 60.0, 20.0)
  train(tmp_path, 'finished', 2100, 70.0, 1234.567)  # the last batch goes beyond its steps
  board = Board(tmp_path, {name: Size(4000, 1, 1) for name in names})
  board.say('a line')
  for name, state in {'waits': State.WAITING, 'runs': State.RUNNING, 'failed': State.FAILED,
                      'pruned': State.PRUNED, 'finished': State.FINISHED,
                      'stopped': State.STOPPED}.items():
    board.tell(members[name], state)
  board.close()
  # Of the 2 * 3000 steps of `runs` and the 4000 of `waits`, 100 are made in a second.
  assert last_table(terminal) == [
      '6 members: 1 waiting, 1 running, 1 stopped, 1 pruned, 1 failed, 1 finished; 100 SPS, '
      '00:01:40 left',
      'member state steps SPS return left',
      'runs running 1,000 of 4,000 100 15.00 00:01:00',
      'failed failed 0 of 4,000',
      'stopped stopped 0 of 4,000',
      'waits waiting 0 of 4,000',
      'pruned pruned 0 of 4,000',
      'finished finished 4,000 of 4,000 1234.57']
  assert 'a line' in terminal.getvalue()


def test_a_long_table_is_cut(tmp_path, monkeypatch):
  terminal = replace_stdout(monkeypatch)
  members = [Member(f'm{i}', 'x', {'seed': i}) for i in range(40)]
  board = Board(tmp_path, {member.name: Size(10, 1, 1) for member in members})
  for member in members:
    board.tell(member, State.WAITING)
  board.tell(members[39], State.RUNNING)
  board.close()
  title, _, first, *rows, last = last_table(terminal)
  assert title == '40 members: 39 waiting, 1 running'
  assert first == 'm39 running 0 of 10' and len(rows) == 29 and last == 'and 10 more'
