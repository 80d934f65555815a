"""Measures the memory of a replay, and the time of its operations compared with a gradient step.

.venv/bin/python -m benchmarks.replay --config=configs/apex_dqn_atari.py --seconds=3

Each capacity is measured in its own process, on one device. The process fills a replay with random
experience and times three operations: adding one rollout of all environments, sampling one batch
(its items read, with their frame stacks), and setting the priorities of a batch. Each is a compiled
program of its own; its time is that of a whole call. `step ms` is the time of a gradient step in
the learner's program, which takes replay.gradient_steps of them and also samples and sets
priorities. `share` is the share of sampling and setting priorities in that time.

Memory, in MB of 10^6 bytes:

- `replay`: the replay, by its shapes;
- `temp`: the temporary memory of the program that needs most of it, by XLA; a program that copied
  the ring would need as much as the ring;
- `peak`: the highest memory of the process (of an accelerator: in use on the device);
- `before`: the memory before the replay was allocated, with the programs and the rollout.

A capacity that does not fit into memory is skipped. Takes --config and its overrides as training
does; --json writes all figures.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common import parse_config
from podracer_jit.actor import priorities
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.runtime import host
from podracer_jit.types import Experience, TrainState

DEFAULT = '--config=configs/apex_dqn_atari.py'
SPARE = 2**31  # bytes that must be free beside the replay, for everything else
LEAST_CALLS = 3  # a median needs at least so many
# The learner's program takes the number of valid rows and the fingerprint of the experience that
# was just added. None is added here.
NOTHING = np.int32(0), np.zeros(2, np.uint32)
COLUMNS = {  # of the table: head -> (field, its format)
    'capacity': ('capacity', '12,.0f'), 'add ms': ('add_ms', '9.2f'),
    'added/s': ('added_per_s', '11,.0f'), 'sample ms': ('sample_ms', '9.3f'),
    'update ms': ('update_ms', '9.3f'), 'step ms': ('step_ms', '9.2f'), 'share': ('share', '6.1%'),
    'replay MB': ('replay_bytes', '9,.1f'), 'B/transition': ('bytes_per_transition', '12,.1f'),
    'temp MB': ('temporary_bytes', '8,.1f'), 'peak MB': ('peak_bytes', '9,.1f'),
    'before MB': ('before_bytes', '9,.1f')}


class Figures(NamedTuple):
  """The figures of one capacity; times are medians of calls."""

  capacity: int
  stored: int  # transitions in the replay that can be sampled
  add_ms: float  # one rollout of all environments
  added_per_s: float  # transitions
  sample_ms: float
  update_ms: float
  step_ms: float  # a gradient step, sampling and setting priorities included
  share: float  # of sampling and setting priorities in a gradient step
  replay_bytes: int  # by its shapes
  bytes_per_transition: float
  temporary_bytes: int  # of the program that needs most, by XLA
  peak_bytes: int
  before_bytes: int
  device: str


class Programs(NamedTuple):
  """Compiled programs; all except `sample` donate their first argument."""

  add: Callable  # (replay, experience [blocks, T, B, ...], turn) -> replay
  sample: Callable  # (replay, turn) -> places [N], items [groups, n, ...]
  update: Callable  # (replay, places [N], TD errors [N]) -> replay
  learn: Callable  # (state, gradient steps, *NOTHING) -> state, metrics


def of_capacity(experiment: Experiment, capacity: int) -> Experiment:
  """Returns the experiment on one device, with a replay of this capacity and no end.

  The replay can be sampled from its first transition on, at any rate.

  Raises:
    ValueError: the experiment does not allow this capacity.
  """
  return changed(
      experiment,
      placement=dict(actor_devices=(0,), learner_devices=(0,)),
      replay=dict(capacity=capacity, min_size=1, samples_per_insert=0.0),
      total_steps=2**30)


def random_experience(experiment: Experiment) -> Experience:
  """Returns a random rollout of all environments, [blocks, T, B, ...].

  No episode ends in it, and an item begins wherever one may.
  """
  spec = experiment.spec
  blocks = experiment.replay_blocks
  steps = experiment.unroll_length
  starts = steps // experiment.items.stride(steps)
  rng = np.random.default_rng(0)
  like = priorities.shapes(experiment.algorithm, experiment.env.num_envs // blocks)

  def random(field, rows, limit):
    shape = (blocks, rows, *field.shape[1:])
    if np.issubdtype(field.dtype, np.integer):
      return rng.integers(0, limit, shape, field.dtype)
    return rng.random(shape, np.float32).astype(field.dtype)

  def constant(field, value, rows=steps):
    return np.full((blocks, rows, *field.shape[1:]), value)

  # A rollout of T steps has T + 1 observations.
  return like._replace(
      obs=random(like.obs, steps + 1, 256),
      is_reset_stack=np.zeros((blocks, steps + 1, *like.is_reset_stack.shape[1:]), bool),
      began=np.zeros((blocks, *like.began.shape), bool),
      action=random(like.action, steps, spec.num_actions),
      reward=random(like.reward, steps, 1),
      terminated=constant(like.terminated, False),
      truncated=constant(like.truncated, False),
      valid=constant(like.valid, True),
      priority=random(like.priority, starts, 1),
      starts=constant(like.starts, True, starts),
      carry=jax.tree.map(lambda field: random(field, 1, 1), like.carry))


def compiled(run: build.Run, state: TrainState, experience: Experience) -> Programs:
  """Compiles all programs by shapes, without allocating the replay."""
  store = run.learner.source.store
  shapes = run.learner.replay_shapes()
  batch_size = run.experiment.replay.batch_size
  groups = run.experiment.num_grad_shards

  def key(turn):
    return jax.random.fold_in(jax.random.key(0), turn)

  def add(state, experience, turn):
    return store.add(state, store.blocks.numbers(), experience, key(turn), turn)

  def sample(state, turn):
    place, _ = store.draw(state, key(turn), batch_size)
    # One group at a time, as in a gradient step.
    return place, jax.lax.map(lambda place: store.read(state, place), place.reshape(groups, -1))

  turn = np.int32(0)
  error = np.zeros(batch_size, np.float32)
  place = error.astype(np.int32)
  learn = run.learner.programs.learn
  return Programs(
      add=jax.jit(add, donate_argnums=0).lower(shapes, experience, turn).compile(),
      sample=jax.jit(sample).lower(shapes, turn).compile(),
      update=jax.jit(store.set_priorities, donate_argnums=0).lower(
          shapes, place, error).compile(),
      learn=learn.lower(state._replace(replay=shapes), turn, *NOTHING).compile())


def timed(call: Callable, *args: Any) -> tuple[float, Any]:
  """Returns the seconds of a call until its results are computed, and the results."""
  start = time.perf_counter()
  results = jax.block_until_ready(call(*args))
  return time.perf_counter() - start, results


def repeat(call: Callable, state: Any, seconds: float) -> tuple[list[float], Any]:
  """Repeats a call on its own state.

  Args:
    call: (state, turn) -> ([seconds of each part], state).
    state: the first state.
    seconds: measured time of each part. The first call is not counted.

  Returns:
    The median seconds of each part, and the last state.
  """
  calls = []
  while len(calls) <= LEAST_CALLS or np.sum(calls[1:]) < seconds * len(calls[0]):
    times, state = call(state, np.int32(len(calls)))
    calls.append(times)
  return [statistics.median(part) for part in zip(*calls[1:], strict=True)], state


def measure(experiment: Experiment, seconds: float) -> Figures:
  """Fills a replay and measures it.

  The figures of memory belong to the whole process, so it should do nothing else.

  Raises:
    MemoryError: the replay does not fit into memory; the message is one line.
  """
  quieten()
  host.prepare_host(experiment.placement, experiment.numerics.deterministic)
  run = build.make_run(experiment)
  (device,) = run.place.mesh.devices.flat
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.replay_shapes()))
  check_fits(size, device)

  state = run.initial_state()
  sharding = NamedSharding(run.place.mesh, PartitionSpec(AXIS))
  experience = jax.device_put(random_experience(experiment), sharding)
  programs = compiled(run, state, experience)
  before = memory_now(device)
  state = filled(run, programs, state, experience)
  count = int(jnp.sum(state.replay.size))
  add, sample, update, step = measured(experiment, programs, state, experience, seconds)

  capacity = experiment.replay.capacity
  return Figures(
      capacity=capacity,
      stored=count,
      add_ms=add * 1e3,
      added_per_s=experiment.batch_rows / add,
      sample_ms=sample * 1e3,
      update_ms=update * 1e3,
      step_ms=step * 1e3,
      share=(sample + update) / step,
      replay_bytes=size,
      bytes_per_transition=size / capacity,
      temporary_bytes=max(x.memory_analysis().temp_size_in_bytes for x in programs),
      peak_bytes=memory_peak(device),
      before_bytes=before,
      device=device.device_kind)


def filled(run: build.Run, programs: Programs, state: TrainState, experience: Experience
           ) -> TrainState:
  """Returns the state with a full replay.

  Args:
    run: the experiment and its learner.
    programs: from `compiled`.
    state: the train state without a replay.
    experience: [blocks, T, B, ...], added repeatedly.
  """
  replay = run.learner.allocate(state).replay
  rows = replay.ring.is_reset_stack.shape[1]
  # The ring's rows and the capacity fill after different numbers of rollouts.
  fills_rows = -(-rows // run.experiment.unroll_length)
  fills_capacity = -(-run.experiment.replay.capacity // run.experiment.batch_rows)
  for turn in range(1 + max(fills_rows, fills_capacity)):
    replay = jax.block_until_ready(programs.add(replay, experience, np.int32(turn)))
  return state._replace(replay=replay)


def measured(experiment: Experiment, programs: Programs, state: TrainState, experience: Experience,
             seconds: float) -> list[float]:
  """Returns seconds of adding, of sampling, of setting priorities, and of a gradient step.

  Args:
    experiment: has the sizes of batches.
    programs: the result of `compiled`.
    state: the train state with a full replay; donated.
    experience: [blocks, T, B, ...], the rollout to add.
    seconds: measured time of each part.
  """
  error = np.random.default_rng(1).random(experiment.replay.batch_size, np.float32)
  steps = np.int32(experiment.replay.gradient_steps)

  def add(replay, turn):
    add_s, replay = timed(programs.add, replay, experience, turn)
    return [add_s], replay

  def draw(replay, turn):
    sample_s, (place, _) = timed(programs.sample, replay, turn)
    update_s, replay = timed(programs.update, replay, place, error)
    return [sample_s, update_s], replay

  def learn(state, turn):
    del turn
    learn_s, (state, metrics) = timed(programs.learn, state, steps, *NOTHING)
    if int(metrics['sampled'][0]) != steps * experiment.replay.batch_size:
      raise AssertionError('the learner sampled fewer transitions than its gradient steps need')
    return [learn_s / steps], state

  # All programs donate their state, so each part goes on with the state that the last one returned.
  adding, replay = repeat(add, state.replay, seconds)
  drawing, replay = repeat(draw, replay, seconds)
  learning, _ = repeat(learn, state._replace(replay=replay), seconds)
  return [*adding, *drawing, *learning]


def check_fits(size: int, device: jax.Device) -> None:
  """Checks that a replay of so many bytes fits into the free memory.

  Raises:
    MemoryError: it does not; the message says how much is free.
  """
  stats = device.memory_stats()
  if stats:
    room = stats['bytes_limit'] - stats['bytes_in_use']
  else:  # the CPU has no such figures
    room = 1024 * proc('/proc/meminfo', 'MemAvailable')
  if size + SPARE > room:
    raise MemoryError(f'does not fit: it takes {size / 1e6:,.1f} MB, and {SPARE / 1e6:,.1f} MB '
                      f'are for the rest; {room / 1e6:,.1f} MB are available')


def memory_now(device: jax.Device) -> int:
  """Returns the bytes in use on an accelerator; for a CPU, the resident bytes of this process."""
  stats = device.memory_stats()
  return stats['bytes_in_use'] if stats else 1024 * proc('/proc/self/status', 'VmRSS')


def memory_peak(device: jax.Device) -> int:
  """Returns the highest `memory_now` so far."""
  stats = device.memory_stats()
  return stats['peak_bytes_in_use'] if stats else 1024 * proc('/proc/self/status', 'VmHWM')


def proc(path: str, name: str) -> int:
  """Returns the number of kB of a line `name: 123 kB` in a file of /proc."""
  return int(re.search(rf'^{name}:\s*(\d+) kB', Path(path).read_text(), re.MULTILINE)[1])


def quieten() -> None:
  """Silences warnings and log lines, which would disturb the table."""


def prepare(experiment: Experiment, capacities: Sequence[str]) -> list[Experiment]:
  """Returns an experiment for each capacity, checked.

  Raises:
    ValueError: the config has no replay, or a capacity is invalid; the message is one line.
  """
  if not experiment.algorithm.learns_from_replay:
    raise ValueError(f'--config: loss.name is {experiment.loss_name}, which has no replay')
  for text in capacities:
    if not re.fullmatch(r'\d+', text):
      raise ValueError('--capacities: must be whole numbers, for example 100000,1000000; '
                       f'got {text!r}')
  return [of_capacity(experiment, int(text)) for text in capacities]


def work(results: Connection, config: Mapping[str, Any], seconds: float) -> None:
  """Runs `measure` in a child process; sends its figures, or why there are none."""
  try:
    results.send(measure(resolve(config), seconds)._asdict())
  except MemoryError as error:
    results.send(dict(skipped=str(error)))
  except jax.errors.JaxRuntimeError as error:  # an accelerator is out of memory
    results.send(dict(failed=str(error).splitlines()[0]))
  except ValueError as error:
    results.send(error)


def row(experiment: Experiment, seconds: float) -> dict[str, Any]:
  """Measures one capacity in a process of its own.

  Returns:
    Its capacity and figures, or its capacity and why it was 'skipped' or has 'failed'.

  Raises:
    ValueError: the config is invalid.
  """
  spawn = multiprocessing.get_context('spawn')
  receiver, sender = spawn.Pipe(duplex=False)
  process = spawn.Process(target=work, args=(sender, experiment.fields, seconds), daemon=True)
  process.start()
  # Only the child may hold the sending end: then `recv` raises EOFError if the child dies.
  sender.close()
  try:
    message = receiver.recv()
  except EOFError:
    process.join()
    message = dict(failed=f'its process died with exit code {process.exitcode}, '
                          'perhaps because memory ran out')
  process.join()
  if isinstance(message, ValueError):
    raise message
  return dict(capacity=experiment.replay.capacity) | message


def headline(experiment: Experiment) -> str:
  """Returns the line above the table: the sizes that are the same for all capacities."""
  options = experiment.replay
  return (f'{experiment.env.task}, {experiment.loss_name}: {experiment.env.num_envs} '
          f'environments x {experiment.unroll_length} rows at once, batches of '
          f'{options.batch_size}, {options.gradient_steps} gradient steps a call, '
          f'{options.eviction}')


def line(figures: Mapping[str, Any]) -> str:
  """Returns a row as a line of the table."""
  for reason in ('skipped', 'failed'):
    if reason in figures:
      return f'{figures["capacity"]:12,}  {reason}: {figures[reason]}'
  return '  '.join(f'{figures[field] / (1e6 if "MB" in head else 1):{form}}'
                   for head, (field, form) in COLUMNS.items())


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_list('capacities', ['100000', '1000000', '2000000'],
                    'Capacities to measure, in transitions.', flag_values=values)
  flags.DEFINE_float('seconds', 3.0, 'Measured time of each operation.', lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  return values


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  quieten()
  values = define_flags()
  rows = []
  if not any(re.match(r'--?config(=|$)', arg) for arg in argv[1:]):
    argv = [argv[0], DEFAULT, *argv[1:]]
  try:
    config = parse_config(argv, values, __doc__)
    if config is None:
      return 0
    experiment = resolve(config)
    experiments = prepare(experiment, values.capacities)
    print(headline(experiment))
    print('  '.join(f'{head:>{form[:form.index(".")].strip(",")}}'
                    for head, (_, form) in COLUMNS.items()), flush=True)
    for item in experiments:
      rows.append(row(item, values.seconds))
      print(line(rows[-1]), flush=True)
  except ValueError as error:
    print(f'replay: {error}', file=sys.stderr)
    return 2
  if values.json:
    Path(values.json).write_text(json.dumps(rows, indent=2) + '\n')
  return int(any('failed' in figures for figures in rows))


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
