"""Measures the memory of a part: its largest heap, and the bytes of its programs from shapes.

The heap is the memory that the C library has given out on the host, sampled while the part runs.
Resident pages are no good measure, since most of them remain from compiling.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.parts.segments import with_program
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.experiment import build
from podracer_jit.schemes.table import SCHEMES

EVERY_S = 0.002
FIELDS = ('arena', 'ordblks', 'smblks', 'hblks', 'hblkhd', 'usmblks', 'fsmblks', 'uordblks',
          'fordblks', 'keepcost')  # malloc.h


class _Mallinfo(ctypes.Structure):
  _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def in_use() -> float:
  """Returns the MB that the C library has given out; the resident MB if it cannot tell."""
  mallinfo = getattr(ctypes.CDLL(None), 'mallinfo2', None)
  if mallinfo is None:
    (line,) = (x for x in Path('/proc/self/status').read_text().splitlines() if 'VmRSS' in x)
    return int(line.split()[1]) / 1e3
  mallinfo.restype = _Mallinfo
  heap = mallinfo()
  return (heap.uordblks + heap.hblkhd) / 1e6


def most_in_use(call: Callable[[], Any]) -> float:
  """Returns the largest `in_use` while `call` runs."""
  ended = threading.Event()
  samples = [in_use()]

  def sample():
    while not ended.wait(EVERY_S):
      samples.append(in_use())

  thread = threading.Thread(target=sample)
  thread.start()
  try:
    call()
  finally:
    ended.set()
    thread.join()
  return max(samples)


class Needs:
  """Records the programs of a part while it is built and makes its first call."""

  def __init__(self, run: build.Run):
    """Prepares `self.run`, a run whose learner records its calls; build the part from it."""
    self._program = run.learner.program
    self.run = with_program(run, self._noting(self._program))
    self._devices = run.place.mesh.size // run.place.processes
    self._learner_args = None  # shapes of the learner's arguments, once it was called
    self._bytes = []  # of each rollout program
    self._batch = 0  # bytes of a batch
    self._place = place = run.place
    self._copied = (place.actors != place.learners
                    or run.experiment.num_shards != len(place.actors) * place.processes)

  def _noting(self, program: Callable) -> Callable:
    def call(*args):
      if self._learner_args is None:
        self._learner_args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args)
        self._batch = sum(x.nbytes for x in jax.tree.leaves(args[1]))
      return program(*args)
    return call

  def noting(self) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which all programs that pools load belong to the part."""
    def note(compiled):
      self._bytes.append(sum(program_memory(compiled).values()))
    return loading(note)

  def mb(self, name: str) -> float | None:
    """Returns the MB that part `name` needs by the shapes of its programs.

    A rollout is counted with the actor's program and with the learner's. With lag 0 the actor waits
    while its rollout is learned from, so one of the two is subtracted. With lag 1 there are three:
    one is learned from, one waits in the channel, one is being made. If an actor has several
    pools, or the learner has other devices, the batch is a copy.

    Returns:
      The MB, or None for a conventional part, which runs other programs.
    """
    if name.startswith('conventional'):
      return None
    # The actors that made the batch of `learner`, or the actions of `environment`, are closed.
    own_bytes = {'learner': [], 'environment': self._bytes[-len(self._place.actors):]}
    total = sum(own_bytes.get(name, self._bytes))
    if self._learner_args is not None:
      learner = self._program.lower(*self._learner_args).compile()
      total += sum(program_memory(learner).values()) * self._devices
      if name in SCHEMES:
        total += (2 * SCHEMES[name].lag - 1 + self._copied) * self._batch
    return total / 1e6


@contextlib.contextmanager
def loading(note: Callable[[Any], None]) -> Iterator[None]:
  """Calls `note` with every program that vector environments compile in the block."""
  load = RolloutProgram.load

  def load_and_note(rollout_program, *args, **kwargs):
    call = load(rollout_program, *args, **kwargs)
    note(rollout_program._program)  # noqa: SLF001 - for its text and its memory
    return call

  with mock.patch.object(RolloutProgram, 'load', load_and_note):
    yield


def program_memory(compiled: Any) -> dict[str, int]:
  """Returns the bytes of a program on one device, by the shapes of its arrays."""
  sizes = compiled.memory_analysis()
  return dict(
      arguments_and_results=(sizes.argument_size_in_bytes + sizes.output_size_in_bytes
                             - sizes.alias_size_in_bytes),
      temporaries=sizes.temp_size_in_bytes)
