"""Environments that are made again: new ones step through the actions that the old ones were sent.

A simulator outside of the program cannot be saved, but its state is a function of its seeds and of
these actions. So it goes on to the bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.actor import rollouts
from podracer_jit.actor.rollout_program import KeptPrograms, RolloutProgram
from podracer_jit.envs.protocol import VectorEnv
from podracer_jit.errors import EnvironmentFailed, OtherEpisodes, Stuck, environment_failure
from podracer_jit.runtime.channels import PATIENCE_S, Closed
from podracer_jit.runtime.output import complain

_MOST_STEPS = 1024  # of a call of the program, of each environment
_CALL_S = 0.5  # duration of a call that is aimed at: a signal takes effect only between calls
_POLL_S = 0.05
_SEEDS_SHOWN = 8
_GRACE_S = 10.0  # that a call has to end after a signal or a failure


class Replay(NamedTuple):
  """An actor's environments, which have just been reset, and what is to be replayed with them."""

  task: str
  seeds: Sequence[int]  # of all environments, for messages
  program: RolloutProgram
  state: rollouts.ActorState  # the first one, on the actor's device
  sent: np.ndarray  # [R, N, T, B, ...], what its N vector environments were sent in R rollouts
  kept: rollouts.ActorState  # the state that they had afterwards

  @property
  def steps(self) -> int:
    """Steps of all environments."""
    rounds, num_shards, unroll_length, width = self.sent.shape[:4]
    return rounds * num_shards * unroll_length * width


def replay(replays: Sequence[Replay], programs: KeptPrograms, stop: Callable[[], bool],
           progress: Callable[[int, int], None]) -> None:
  """Replays actors' environments side by side, each on a thread.

  Args:
    replays: of all actors of this process.
    programs: of earlier segments; the new ones are added.
    stop: whether the run shall stop.
    progress: called several times a second with the number of steps done, and of all.

  Raises:
    Closed: `stop` says so.
    EnvironmentFailed: an environment has failed.
    OtherEpisodes: environments are in another state than they were.
    Stuck: an environment does not answer, after a failure or a stop.
  """
  if not replays:
    return
  done = [0] * len(replays)
  errors: list[BaseException] = []
  is_stopped = threading.Event()

  def work(i: int) -> None:
    try:
      for steps in _calls(replays[i], programs):
        done[i] = steps
        if is_stopped.is_set():
          return
    except BaseException as error:  # noqa: BLE001 - raised by the main thread
      errors.append(error)

  threads = [threading.Thread(target=work, args=(i,), name=f'replay of actor {i}', daemon=True)
             for i in range(len(replays))]
  total = sum(each.steps for each in replays)
  for thread in threads:
    thread.start()
  try:
    _watch(replays, threads, done, lambda: bool(errors) or stop(), progress)
  except BaseException as error:  # noqa: BLE001 - the threads must end before their pools close
    errors.append(error)
  is_stopped.set()
  deadline = time.monotonic() + _GRACE_S
  try:
    while _alive(replays, threads, done) and time.monotonic() < deadline:
      time.sleep(_POLL_S)
  except KeyboardInterrupt as error:  # nobody wants to wait any longer
    errors.append(error)
  alive = _alive(replays, threads, done)
  if alive:
    error = errors[0] if errors else EnvironmentFailed(f'no answer of {alive[0]}')
    raise Stuck(f'{"; ".join(alive)} did not end within {_GRACE_S:.0f} s') from error
  if errors:
    raise errors[0]
  if stop():
    raise Closed('replay')
  progress(total, total)


def _watch(replays: Sequence[Replay], threads: Sequence[threading.Thread], done: Sequence[int],
           is_over: Callable[[], bool], progress: Callable[[int, int], None]) -> None:
  """Waits until all threads have ended, or `is_over`; says where environments do not answer.

  Args:
    replays: what the threads replay.
    threads: one for each.
    done: steps that each has done.
    is_over: whether to wait no longer.
    progress: see `replay`.
  """
  total = sum(each.steps for each in replays)
  progress(0, total)
  before = 0
  changed_s = time.monotonic()
  while any(thread.is_alive() for thread in threads) and not is_over():
    time.sleep(_POLL_S)
    now_s = time.monotonic()
    if before != sum(done) < total:
      before, changed_s = sum(done), now_s
      progress(before, total)
    elif now_s - changed_s > PATIENCE_S:
      changed_s = now_s
      for where in _alive(replays, threads, done):
        complain(f'podracer_jit: warning: waiting for {PATIENCE_S:.0f} s for {where}')


def _alive(replays: Sequence[Replay], threads: Sequence[threading.Thread], done: Sequence[int]
           ) -> list[str]:
  """Returns where the threads are that have not ended."""
  return [_where(*each) for *each, thread in zip(replays, done, threads, strict=True)
          if thread.is_alive()]


def _where(replay: Replay, done: int) -> str:
  """Returns which environments are replayed, and at which step they are."""
  each = done // len(replay.seeds)
  seeds = [str(seed) for seed in replay.seeds[:_SEEDS_SHOWN]]
  more = len(replay.seeds) - len(seeds)
  return (f'{replay.task}, replayed to step {each:,} of each environment (seeds {", ".join(seeds)}'
          + (f' and {more} more)' if more else ')'))


def _calls(replay: Replay, programs: KeptPrograms) -> Iterator[int]:
  """Replays an actor's environments; yields the number of steps done after each call.

  Raises:
    EnvironmentFailed: an environment has failed.
    OtherEpisodes: environments are in another state than they were.
  """
  vector_envs = replay.program.vector_envs
  sent = replay.sent
  rounds, num_shards, unroll_length, width = sent.shape[:4]
  total = rounds * unroll_length
  most = min(total, _MOST_STEPS)
  token = replay.state.token
  states = tuple(env.simulator for env in replay.state.envs)
  like = tuple(jax.ShapeDtypeStruct((most, *sent.shape[3:]), sent.dtype) for _ in vector_envs)
  program = replay.program.load(
      _make_replay(vector_envs), (token, states, like, 1), donate=(), kept=programs, key='replay')
  done = 0
  count = 1
  while done < total:
    count = min(count, most, total - done)
    began_s = time.monotonic()
    actions = tuple(_rows(sent[:, i], done, count, most) for i in range(num_shards))
    try:
      token, states, steps = jax.block_until_ready(program(token, states, actions, count))
    except Exception as error:
      words = environment_failure(error)
      if not words:
        raise
      raise EnvironmentFailed(f'{words}; it was replayed, in one of the steps {done + 1:,} to '
                              f'{done + count:,}') from error
    done += count
    seconds = time.monotonic() - began_s
    count = max(1, int(count * min(4.0, _CALL_S / max(seconds, 1e-6))))
    yield done * num_shards * width
  for first, kept, step in zip(replay.state.envs, replay.kept.envs, steps, strict=True):
    now, _ = rollouts.end_row(first, step)
    if not all(_is_equal(a, b) for a, b in ((now.obs, kept.obs), (now.ended, kept.ended))):
      raise OtherEpisodes(
          f'env.task: {replay.task} cannot go on where it was: after {total:,} steps with the same '
          'seeds and actions its environments give other observations, so they depend on something '
          'else')


def _rows(sent: np.ndarray, start: int, count: int, size: int) -> np.ndarray:
  """Returns actions [size, B, ...], of which `count` are set: those from step `start` on.

  Args:
    sent: [R, T, B, ...], possibly of a file.
    start: the first step.
    count: number of steps.
    size: of the result.
  """
  unroll_length = sent.shape[1]
  first = start // unroll_length
  whole = sent[first:-(-(start + count) // unroll_length)]
  rows = whole.reshape(-1, *sent.shape[2:])[start - first * unroll_length:]
  out = np.zeros((size, *rows.shape[1:]), rows.dtype)
  out[:count] = rows[:count]
  return out


def _make_replay(vector_envs: Sequence[VectorEnv]) -> Callable:
  """Returns replay(token, states, actions, count) -> (token, states, the last steps), to be jitted.

  `actions` has an array [C, B, ...] for each vector environment, of which `count` [] i32 are taken.
  The vector environments step at the same time.
  """
  def step(t: Any, token: jax.Array, states: Sequence[Any], actions: Sequence[jax.Array]):
    """Takes step t of all vector environments.

    Args:
      t: [] i32, index of the step.
      token: orders the calls of simulators.
      states: of each vector environment.
      actions: [C, B, ...] of each vector environment.

    Returns:
      The token, the states after the step, and the step of each vector environment.
    """
    states = list(states)
    for i, (vector_env, rows) in enumerate(zip(vector_envs, actions, strict=True)):
      action = rows[t]
      if jnp.issubdtype(action.dtype, jnp.integer):
        action = action.astype(jnp.int32)  # as policies give it
      token, states[i] = vector_env.send(token, states[i], action)
    steps = []
    for i, vector_env in enumerate(vector_envs):
      token, states[i], received = vector_env.recv(token, states[i])
      steps.append(received)
    return token, tuple(states), steps

  def replay(token, states, actions, count):
    """Takes the first steps of all vector environments; see above.

    Args:
      token: orders the calls of simulators.
      states: of each vector environment.
      actions: [C, B, ...] of each vector environment.
      count: [] i32, steps to take, at least 1.
    """
    def turn(t, carry):
      token, states, _ = step(t, *carry, actions)
      return token, states

    token, states = lax.fori_loop(0, count - 1, turn, (token, states))
    return step(count - 1, token, states, actions)

  return replay


def _is_equal(a: jax.Array, b: jax.Array) -> bool:
  """Returns whether two arrays have the same bytes; NaN equals itself."""
  a, b = map(np.asarray, (a, b))
  return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
