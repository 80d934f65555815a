"""Actors (R) and gradient workers (G) in processes of a cluster, called from this process.

Each fires `Remote.submit` and `Remote.wait` where an actor of this process fires a program. Values
come back as read-only NumPy views of memory that Ray shares; JAX aliases them on CPUs, and no
program donates them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer_jit.cluster.remote import Answer, Call, Remote
from podracer_jit.runtime.channels import Versioned
from podracer_jit.schemes.wiring import Plan

# Calls that are timed before it is decided how many are under way; the first one compiles.
_TIMED = 5
# Two calls are under way if the round trip costs more than this share of a rollout.
_SHARE = 0.1


class Pace:
  """Number of calls of an actor under way at the same time."""

  def __init__(self, most: int):
    """Begins with one call.

    Args:
      most: the largest number of calls: 2 if the actor may act with parameters that are a rollout
        older, else 1.
    """
    self.calls = 1
    self._most = most
    self._times: list[tuple[float, float]] | None = []  # (rollout, round trip) in seconds

  def take_times(self, answer: Answer) -> None:
    """Notes the times of an answer; decides the number of calls once there are enough."""
    if self._times is None:
      return
    # Not the answer itself, whose rollout would stay in memory.
    self._times.append((answer.seconds, answer.round_trip_s))
    if len(self._times) > _TIMED:
      rollouts_s, trips_s = map(sum, zip(*self._times[1:], strict=True))
      if trips_s - rollouts_s > _SHARE * rollouts_s:
        self.calls = self._most
      self._times = None


class Kept(NamedTuple):
  """Experience that stays in the cluster, and a way to make it again if it is lost."""

  reference: Any
  again: Callable[[], Any]  # returns another reference


class RemoteActor:
  """Actor of a segment in a process of the cluster; see `wiring.Actor`."""

  state = None  # the process has it

  def __init__(self, remote: Remote, pace: Pace, segment: int, first_env: int,
               publish: Callable[[Any], Any], keeps: bool):
    """Creates an actor.

    Args:
      remote: an object with the method `rollout`.
      pace: decides the number of its calls under way.
      segment: index of the segment.
      first_env: index of its first environment among those of the run.
      publish: makes parameters known to the cluster.
      keeps: the experience stays in the cluster, as its gradients are computed there.
    """
    self.first_env = first_env
    self._remote = remote
    self._pace = pace
    self._segment = segment
    self._publish = publish
    self._keeps = keeps

  def receive(self, params: Any) -> Any:
    """See `wiring.Actor`."""
    return self._publish(params)

  def load(self, plan: Plan) -> None:
    """See `wiring.Actor`; the process compiles it with the first rollout."""

  def begin(self, plan: Plan, ended: Callable[[], bool]) -> Callable:
    """See `wiring.Actor`."""
    del plan
    calls: collections.deque[tuple[Call, Versioned]] = collections.deque()

    def submit(params: Versioned) -> tuple[Call, Versioned]:
      return self._remote.submit('rollout', self._segment, params.value), params

    def rollout(state: None, params: Versioned) -> tuple[None, Versioned]:
      while len(calls) < self._pace.calls:
        calls.append(submit(params))
      call, used = calls.popleft()
      answer = self._remote.wait(call, ended, fetch=not self._keeps)
      self._pace.take_times(answer)
      value = answer.value
      if self._keeps:
        def again() -> Any:
          lost, _ = submit(used)
          return self._remote.wait(lost, ended, fetch=False).value
        value = Kept(answer.value, again)
      return state, Versioned(value, used.version)

    return rollout

  def experience_shapes(self) -> None:
    """See `wiring.Actor`."""


class Prepared(NamedTuple):
  """Inputs of the gradient steps of an update; a process that has not prepared it can do so."""

  params: Any  # reference to the parameters at the beginning of the update
  key: np.ndarray  # data of the update's PRNG key
  update: int
  rollouts: list[Kept]


class RemoteGradients:
  """Gradient worker in a process of the cluster; see `gradients.GradientWorker`."""

  def __init__(self, remote: Remote, publish: Callable[[Any], Any]):
    """Creates a worker.

    Args:
      remote: an object with the method `gradient`.
      publish: makes parameters known to the cluster.
    """
    self._remote = remote
    self._publish = publish
    self._key: Any = None
    self._ended: Callable[[], bool] = bool

  def receive(self, params: Any) -> Any:
    """See `GradientWorker`."""
    return self._publish(params)

  def take_from(self, first_env: int) -> Callable[[Any], Any]:
    """See `GradientWorker`; references need not be sent."""
    del first_env
    return lambda kept: kept

  def begin(self, key: jax.Array, ended: Callable[[], bool]) -> None:
    """See `GradientWorker`."""
    self._key = jax.device_get(jax.random.key_data(key))
    self._ended = ended

  def prepare(self, params: Any, update: int, rollouts: Sequence[Kept]) -> Prepared:
    """See `GradientWorker`; the process prepares with the first gradient step."""
    return Prepared(params, self._key, update, list(rollouts))

  def gradient(self, params: Any, prepared: Prepared, step: int) -> tuple[Any, Any]:
    """See `GradientWorker`."""
    while True:
      # In a list, references arrive as such. So a lost one is an answer and not the end.
      references = [kept.reference for kept in prepared.rollouts]
      call = self._remote.submit('gradient', params, prepared.update, step, prepared.key,
                                 [prepared.params, *references])
      answer = self._remote.wait(call, self._ended).value
      if answer is not None:
        return answer
      for i, kept in enumerate(prepared.rollouts):
        prepared.rollouts[i] = kept._replace(reference=kept.again())
