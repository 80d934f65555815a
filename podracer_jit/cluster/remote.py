"""Calls of an object in a process of the cluster; a new process takes the place of a dead one.

The calls of a dead process are made again, and `placement.actor_lives` bounds how often. Ray's
`max_restarts` is not used, because Ray would count lives without telling: the life is part of the
seeds and of the receipts.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol

import ray
from ray import exceptions

from podracer_jit.cluster.process import About, about
from podracer_jit.errors import WorkerLost
from podracer_jit.options import shorten
from podracer_jit.runtime.channels import PATIENCE_S, Closed

_logger = logging.getLogger(__name__)
# A waiting call checks so often, in seconds, whether the run ends.
_POLL_S = 0.2
# The last output of a dead process arrives within these seconds.
_LAST_WORDS_S = 1.5
_GONE = (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError,
         exceptions.OutOfMemoryError, exceptions.RaySystemError)
_LOST = (exceptions.ObjectLostError,)
_NO_MACHINE = 'its machine is gone'


class Answer(NamedTuple):
  """The answer to a call."""

  value: Any  # the result, or its reference
  seconds: float  # duration of the call in the process
  round_trip_s: float  # from the call until now


@dataclasses.dataclass
class Call:
  """A call under way."""

  method: str
  args: Sequence[Any]
  life: int  # the life of the process that has the call
  header: ray.ObjectRef
  result: ray.ObjectRef
  since: float  # `time.perf_counter` of the first attempt
  # While the result is fetched: it, and since when.
  fetching: tuple[futures.Future, float] | None = None


@dataclasses.dataclass
class Counters:
  """Figures of all remote objects of a run; several threads add to them."""

  restarts: int = 0
  nbytes: int = 0  # bytes that this process has received
  gets: int = 0
  get_s: float = 0.0
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def add(self, **amounts: float) -> None:
    """Adds amounts to the counters of these names."""
    with self.lock:
      for name, amount in amounts.items():
        setattr(self, name, getattr(self, name) + amount)


class Shared(Protocol):
  """Interface of a cluster to its remote objects; `ray_cluster.Cluster` has it."""

  most_deaths: int  # deaths in a row, without an answer between them, after which calls fail
  counters: Counters
  gives_up: Callable[[], bool]  # asked while a call waits; if it returns True, the wait ends

  def last_words(self, pid: str) -> Sequence[str]:
    """Returns the last lines that a process printed."""


class Remote:
  """An object in a process of the cluster.

  `begin` builds the process from the object's life alone, so a new process needs nothing from the
  dead one. Calls are answered in order.
  """

  def __init__(self, name: str, begin: Callable[[int], Any], needs: str, cluster: Shared):
    """Asks the cluster for the first process; returns at once.

    Args:
      name: the name of the object for messages, such as 'actor 3'.
      begin: life -> handle of an actor of Ray, a `process.Process`.
      needs: what a machine must have for the process, in words.
      cluster: what all objects of a run share.
    """
    self.name = name
    self.life = 0
    self.about: About | None = None  # of the process; None before it runs
    self._begin = begin
    self._deaths = 0
    self._needs = needs
    self._cluster = cluster
    self._patience_s = PATIENCE_S  # seconds of waiting between two warnings
    self._lock = threading.RLock()
    self._start()

  def _start(self) -> None:
    self.about = None
    self._handle = self._begin(self.life)
    self._introduction = self._handle.about.remote()

  def close(self) -> None:
    """Ends the process."""
    ray.kill(self._handle)

  def submit(self, method: str, *args: Any) -> Call:
    """Begins a call.

    Args:
      method: the name of a method of the object.
      *args: arguments of the method; references among them arrive as values.

    Returns:
      The call, for `wait`.
    """
    with self._lock:
      header, result = self._handle.call.options(num_returns=2).remote(method, *args)
      return Call(method, args, self.life, header, result, time.perf_counter())

  def wait(self, call: Call, ended: Callable[[], bool], fetch: bool = True) -> Answer:
    """Blocks until a call is answered.

    A call whose process died, or whose result was lost with a machine, is made again.

    Args:
      call: a call of this object.
      ended: called again and again; once it returns True, waiting ends.
      fetch: whether to return the result itself, or a reference to it.

    Raises:
      Closed: `ended` is true, or the run gives up.
      WorkerLost: the call has raised an exception, or processes died again and again.
    """
    warned = call.since
    broken: float | None = None  # since when the connection is broken
    while True:
      try:
        answer = self._answer(call, fetch)
      except exceptions.RayTaskError as error:
        raise WorkerLost(f'{self._who()}: {_one_line(error)}') from None
      except exceptions.ActorUnavailableError as error:
        # Ray does not know yet whether the process, or its machine, is dead. A new process now
        # could begin on a machine that is gone.
        if broken is None:
          broken = time.perf_counter()
        if time.perf_counter() - broken > self._patience_s:
          self._replace(call.life, error)
        elif ended() or self._cluster.gives_up():
          raise Closed(self.name) from None
        else:
          time.sleep(_POLL_S)
        self._again(call)
        continue
      except _GONE as error:
        broken = None
        self._replace(call.life, error)
        self._again(call)
        continue
      except _LOST:
        self._again(call)
        continue
      except exceptions.RayError as error:
        raise WorkerLost(f'{self._who()}: {type(error).__name__}: {shorten(str(error))}') from None
      broken = None
      if answer is not None:
        self._deaths = 0
        return answer
      if ended() or self._cluster.gives_up():
        raise Closed(self.name)
      self._greet()
      now = time.perf_counter()
      if now - warned >= self._patience_s:
        warned = now
        self._warn(now - call.since)

  def _answer(self, call: Call, fetch: bool) -> Answer | None:
    """Returns the answer; None if there is none for a short time."""
    ready, _ = ray.wait([call.header], timeout=_POLL_S)
    if not ready:
      return None
    header = ray.get(call.header)
    value = call.result
    if fetch:
      # A `ray.get` that times out drops what has arrived, and the next one begins anew.
      call.fetching = call.fetching or (call.result.future(), time.perf_counter())
      future, start = call.fetching
      if not futures.wait([future], _POLL_S).done:
        return None
      value = future.result()
      self._cluster.counters.add(nbytes=header.nbytes, gets=1, get_s=time.perf_counter() - start)
    if self.about is None:
      self._greet()
    return Answer(value, header.seconds, time.perf_counter() - call.since)

  def _again(self, call: Call) -> None:
    """Makes a call again."""
    repeated = self.submit(call.method, *call.args)
    call.life = repeated.life
    call.header = repeated.header
    call.result = repeated.result
    call.fetching = None

  def _replace(self, life: int, error: Exception) -> None:
    """Begins a new process in place of a dead one.

    Args:
      life: the life of the dead process; another thread may have replaced it already.
      error: the error of Ray that tells of the death.

    Raises:
      WorkerLost: too many have died.
    """
    with self._lock:
      if life != self.life:
        return
      pid, place = self._process(error)
      cause = _cause(error)
      # Machines may come and go as often as they like.
      self._deaths += cause != _NO_MACHINE
      if self._deaths >= self._cluster.most_deaths:
        time.sleep(_LAST_WORDS_S)
        lines = ' | '.join(self._cluster.last_words(pid)) or 'nothing'
        raise WorkerLost(f'{self.name}: its process died {self._deaths} times in a row without an '
                     f'answer, the last time {place} ({cause}); it printed last: {lines}')
      self.life += 1
      self._cluster.counters.add(restarts=1)
      _logger.warning('%s: %s died (%s); life %d begins', self.name, place, cause, self.life)
      self._start()

  def _process(self, error: Exception) -> tuple[str, str]:
    """Returns the id of a dead process, and words for it."""
    if self.about is not None:
      return str(self.about.pid), self.about.place
    # It died before it could introduce itself.
    pid = re.search(r'pid: (\d+)', str(error))
    host = re.search(r'\bip: (\S+)', str(error))
    if not pid:
      return '', 'its process'
    return pid[1], f'process {pid[1]} on {host[1] if host else "an unknown machine"}'

  def _greet(self) -> None:
    """Notes the process once it runs, and compares its versions with those of this process.

    Raises:
      WorkerLost: results would differ, or programs fail.
    """
    with self._lock:
      if self.about is not None:
        return
      try:
        ready, _ = ray.wait([self._introduction], timeout=0)
        introduced = ray.get(self._introduction) if ready else None
      except (*_GONE, *_LOST):
        return  # the call itself finds out, too
      if introduced is None:
        return
      for problem in problems_of_versions(introduced, about()):
        raise WorkerLost(f'{self.name}: {problem}')
      own = about()
      if introduced.cpu != own.cpu:
        _logger.warning('%s runs on another kind of processor, %s, than the learner, %s: it may '
                        'round otherwise', self.name, introduced.cpu, own.cpu)
      self.about = introduced

  def _who(self) -> str:
    return self.name if self.about is None else f'{self.name} ({self.about.place})'

  def _warn(self, seconds: float) -> None:
    """Warns that the process has not answered."""
    if self.about is None:
      _logger.warning('%s: waiting for %.0f s for its process to start, on a machine with room for '
                      '%s', self.name, seconds, self._needs)
    else:
      _logger.warning('%s: waiting for %.0f s for %s to answer', self.name, seconds,
                      self.about.place)


def problems_of_versions(about_remote: About, own: About) -> list[str]:
  """Returns lines about versions of a process that do not fit those of this one."""
  other = [f'{name} {version} ({own.versions.get(name)} here)'
           for name, version in about_remote.versions.items() if version != own.versions.get(name)]
  if not other:
    return []
  return [f'{about_remote.host} has other versions than the learner: {", ".join(other)}; install '
          'the same on all machines']


def _one_line(error: exceptions.RayTaskError) -> str:
  """Returns the exception that code on the cluster raised, in one line."""
  cause = error.cause
  words = shorten(str(cause), 400)
  name = type(cause).__name__
  return words if name == 'EnvironmentFailed' else f'{name}: {words}'


def _cause(error: Exception) -> str:
  """Returns why a process has died, in a few words."""
  words = str(error)
  if isinstance(error, exceptions.ActorUnavailableError):
    return 'the connection to it broke'
  if isinstance(error, exceptions.OutOfMemoryError) or 'memory monitor' in words:
    return 'the memory of its machine was used up'
  if re.search('node (has died|is dead|was terminated)|node failure', words, re.IGNORECASE):
    return _NO_MACHINE
  detail = re.search(r'Worker exit detail: (.*?)(?: Some common|$)', words, re.DOTALL)
  return shorten(detail[1] if detail else words, 200)
