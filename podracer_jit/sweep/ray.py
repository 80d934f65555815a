"""Trains members of a sweep as tasks of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from podracer_jit.cluster.commands import Commands
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.local import log_of
from podracer_jit.sweep.members import Member
from podracer_jit.workdir import files


class OnRay:
  """Members on a cluster; see `training.Jobs`."""

  def __init__(self, out: Path, room: int, sizes: Mapping[str, Size]):
    """Begins without any.

    Args:
      out: the folder of the sweep, which all machines see.
      room: members that may run at once, each on one CPU.
      sizes: of each member, by its name.
    """
    self._out = out.resolve()
    self.room = room
    self._sizes = sizes
    self._commands = Commands(cpus=1, gpus=0)
    self._members: dict[str, Member] = {}

  @property
  def running(self) -> list[Member]:
    """See `training.Jobs`, as for the other methods."""
    return list(self._members.values())

  @property
  def has_room(self) -> bool:
    """See `training.Jobs`."""
    return len(self._members) < self.room

  def begin(self, member: Member) -> None:
    """See `training.Jobs`."""
    log = log_of(self._out, member)
    files.make_folder(log.parent)
    self._commands.begin(member.name, member.command(self._out)[1:], log,
                         self._sizes[member.name].memory)
    self._members[member.name] = member

  def ended(self) -> Iterator[tuple[Member, int]]:
    """See `training.Jobs`."""
    for name, code in self._commands.ended():
      yield self._members.pop(name), code

  def stop(self, member: Member | None = None) -> None:
    """See `training.Jobs`."""
    for name in [member.name] if member else self._members:
      self._commands.stop(name)

  def close(self, grace_s: float = 0.0) -> None:
    """See `training.Jobs`; tasks that go on are ended with the connection."""
    deadline = time.monotonic() + grace_s
    while self._members and time.monotonic() < deadline:
      time.sleep(0.2)
      list(self.ended())
