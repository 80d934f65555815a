"""sweep.json in the folder of a sweep: its members, and what became of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer_jit.options import shorten
from podracer_jit.sweep.members import SEED, Member
from podracer_jit.workdir import files

NAME = 'sweep.json'
CONFIG = 'config.json'  # as `workdir.record`, which imports JAX, names it


class Folder:
  """The members that a sweep has ever had, in order, and which of them have ended."""

  def __init__(self, out: Path, version: str, is_dry: bool = False):
    """Reads sweep.json, if there is one.

    Args:
      out: the folder.
      version: of this package.
      is_dry: nothing is written.

    Raises:
      ValueError: the file is garbled, or of another version.
    """
    self.path = out
    self._version = version
    self.is_dry = is_dry
    self.commands: list[list[str]] = []  # of the sweep itself, each once
    self.configs: dict[str, Any] = {}  # as JSON has them, by what --config says
    self._members: dict[str, Member] = {}
    self._finished: set[str] = set()
    self._pruned: set[str] = set()
    self.errors: dict[str, str] = {}  # of members that have failed, by name
    file = out / NAME
    if not file.exists():
      return
    try:
      content = files.read_json(file)
      before = content['version']
      self.configs = dict(content['configs'])
      self.commands = [[*map(str, command)] for command in content.get('commands', ())]
      for item in content['members']:
        member = Member.of_json(item)
        self._members[member.name] = member
        if item['finished']:
          self._finished.add(member.name)
        if item.get('pruned'):
          self._pruned.add(member.name)
        if item['error'] is not None:
          self.errors[member.name] = str(item['error'])
    except (KeyError, TypeError, ValueError, AttributeError):
      raise ValueError(f'--out: {file} is not of a sweep') from None
    if before != version:
      raise ValueError(f'--out: the sweep in {out} is of podracer_jit {shorten(str(before))}, and '
                       f'this is {version}; choose another --out')

  @property
  def members(self) -> list[Member]:
    """All members, in the order in which they were asked for."""
    return list(self._members.values())

  def add(self, members: Sequence[Member], configs: Mapping[str, Any]) -> None:
    """Adds the members of a command. Of those that are known, only the flags may differ.

    Flags that are another experiment are refused with the configs.

    Args:
      members: of the command.
      configs: as JSON has them, by what --config says.

    Raises:
      ValueError: a known member of this name is another one.
    """
    for member in members:
      known = self._members.get(member.name, member)
      self._members[member.name] = member
      if known._replace(flags=()) != member._replace(flags=()):
        raise ValueError(f'--out: {self.path} has a member {member.name} already, which is '
                         f'podracer_jit {" ".join(known.arguments())}; choose another --out')
    self.configs |= {name: self.configs.get(name, config) for name, config in configs.items()}

  def began(self, command: Sequence[str]) -> None:
    """Notes a command that trains members of the sweep."""
    if [*command] not in self.commands:
      self.commands.append([*command])

  def not_covered(self, members: Sequence[Member]) -> list[Member]:
    """Returns members of one seed whose seed no member of several trains."""
    covered = {(member.config, _rest(member), seed) for member in self.members
               if member.num_seeds for seed in member.seeds}
    return [member for member in members
            if (member.config, _rest(member), member.seeds[0]) not in covered]

  def covering(self, members: Sequence[Member]) -> Iterator[Member]:
    """Yields the members of several seeds that train a seed of these members."""
    wanted = {(member.config, _rest(member), member.seeds[0]) for member in members}
    for member in self.members:
      if member.num_seeds and any((member.config, _rest(member), seed) in wanted
                                  for seed in member.seeds):
        yield member

  def is_finished(self, member: Member) -> bool:
    """Returns whether a member has made all its steps."""
    return member.name in self._finished and all(
        (workdir / CONFIG).exists() for workdir in member.workdirs(self.path))

  def is_pruned(self, member: Member) -> bool:
    """Returns whether a search has given a member up."""
    return member.name in self._pruned

  def has_ended(self, member: Member) -> bool:
    """Returns whether a member has finished, has failed or was pruned."""
    return self.is_finished(member) or self.is_pruned(member) or member.name in self.errors

  def finished(self, member: Member) -> None:
    """Notes that a member has made all its steps."""
    self.retry([member])
    self._finished.add(member.name)
    self.write()

  def pruned(self, member: Member) -> None:
    """Notes that a search has given a member up."""
    self._pruned.add(member.name)
    self.write()

  def failed(self, member: Member, error: str) -> None:
    """Notes the error of a member."""
    self.errors[member.name] = error
    self.write()

  def retry(self, members: Sequence[Member]) -> None:
    """Forgets that members have failed or were pruned; they run again."""
    for member in members:
      self.errors.pop(member.name, None)
      self._pruned.discard(member.name)

  def write(self) -> None:
    """Writes sweep.json.

    Raises:
      OSError: it cannot be written.
    """
    if self.is_dry:
      return
    members = [member.as_json() | {'command': member.command(self.path),
                                   'finished': member.name in self._finished,
                                   'pruned': member.name in self._pruned,
                                   'error': self.errors.get(member.name)}
               for member in self.members]
    content = {'version': self._version, 'commands': self.commands, 'configs': self.configs,
               'members': members}
    files.write(self.path / NAME, json.dumps(content, indent=2) + '\n')


def _rest(member: Member) -> str:
  """Returns the fields of a member but its seed."""
  return repr({name: value for name, value in member.fields.items() if name != SEED})
