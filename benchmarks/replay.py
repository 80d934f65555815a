"""What a replay costs beside the learner's gradient step, and the memory it takes.

.venv/bin/python -m benchmarks.replay --config=configs/apex_dqn_atari.py --seconds=3

For each capacity, in a process of its own and on one device, a replay is filled with random
experience and then measured: adding one rollout of all environments; sampling one batch, its stacks
put together again; setting the priorities of a batch. Each is a program of its own, and a call of
it is timed from start to end. A gradient step is that of the learner's program with as many as
replay.gradient_steps, which samples and sets priorities too: of its time, the share of both.

`replay` is the memory of the replay by its shapes, `temp` what XLA says that the hungriest of the
programs needs for a while beside it (were the ring copied, that would be as large), `peak` the most
that the process ever had (of an accelerator: in use on the device), `before` what it had when the
replay was not there yet but programs and the rollout were. MB are 10^6 bytes. A capacity that does
not fit is skipped. Takes --config and its overrides as training does; --json writes all
figures.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.sharding import NamedSharding, PartitionSpec

from podracer_jit.actor import priorities
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.run import build, command_line
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.resolve import changed, resolve
from podracer_jit.runtime import host
from podracer_jit.types import Experience, TrainState

DEFAULT = '--config=configs/apex_dqn_atari.py'
SPARE = 2**31  # bytes that must be left for all that is not the replay
LEAST_CALLS = 3  # of a median
NOTHING = np.int32(0), np.zeros(2, np.uint32)  # valid rows and fingerprint of what was not added
COLUMNS = {  # of the table: head -> (field, its format)
    'capacity': ('capacity', '12,.0f'), 'add ms': ('add_ms', '9.2f'),
    'added/s': ('added_per_s', '11,.0f'), 'sample ms': ('sample_ms', '9.3f'),
    'update ms': ('update_ms', '9.3f'), 'step ms': ('step_ms', '9.2f'), 'share': ('share', '6.1%'),
    'replay MB': ('replay_bytes', '9,.1f'), 'B/transition': ('bytes_per_transition', '12,.1f'),
    'temp MB': ('temporary_bytes', '8,.1f'), 'peak MB': ('peak_bytes', '9,.1f'),
    'before MB': ('before_bytes', '9,.1f')}


class Figures(NamedTuple):
  """Of one capacity; times are medians of calls."""

  capacity: int
  held: int  # transitions that could be drawn meanwhile
  add_ms: float  # one rollout of all environments
  added_per_s: float  # transitions
  sample_ms: float
  update_ms: float
  step_ms: float  # a gradient step, with both
  share: float  # of a gradient step that sampling and setting priorities take
  replay_bytes: int  # by its shapes
  bytes_per_transition: float
  temporary_bytes: int  # the most of a program, by XLA
  peak_bytes: int
  before_bytes: int
  device: str


class Programs(NamedTuple):
  """Compiled; all but `sample` donate what they are given first."""

  add: Callable  # (replay, experience [groups, T, B, ...], turn) -> replay
  sample: Callable  # (replay, turn) -> replay.Sample
  update: Callable  # (replay, places [groups, n], TD errors [groups, n]) -> replay
  learn: Callable  # (state, gradient steps, valid rows and fingerprint: of none) -> state, metrics


def of_capacity(experiment: Experiment, capacity: int) -> Experiment:
  """The experiment with a replay of this capacity, on one device, drawn from at once, never done.

  Raises:
    ValueError: it cannot have such a replay.
  """
  return changed(
      experiment,
      placement=dict(actor_devices=(0,), learner_devices=(0,)),
      replay=dict(capacity=capacity, min_size=1, samples_per_insert=0.0),
      total_steps=2**30)


def random_experience(experiment: Experiment) -> Experience:
  """A rollout of all environments, [groups, T, B, ...]: no episode ends, any row can be drawn."""
  spec, rng = experiment.spec, np.random.default_rng(0)
  groups, steps = experiment.num_grad_shards, experiment.unroll_length
  one = priorities.shapes(experiment.env.num_envs // groups, spec.obs_shape, spec.obs_dtype,
                          spec.stack, experiment.policy)

  def random(like, rows, most):
    shape = groups, rows, *like.shape[1:]
    if np.issubdtype(like.dtype, np.integer):
      return rng.integers(0, most, shape, like.dtype)
    return rng.random(shape, np.float32).astype(like.dtype)

  def always(like, value):
    return np.full((groups, steps, *like.shape[1:]), value)
  return one._replace(
      obs=random(one.obs, steps + 1, 256),
      fresh=np.zeros((groups, steps + 1, *one.fresh.shape[1:]), bool),
      began=np.zeros((groups, *one.began.shape), bool),
      action=random(one.action, steps, spec.num_actions), reward=random(one.reward, steps, 1),
      terminated=always(one.terminated, False), truncated=always(one.truncated, False),
      valid=always(one.valid, True), priority=random(one.priority, steps, 1),
      starts=always(one.starts, True))


def compiled(run: build.Run, state: TrainState, made: Experience) -> Programs:
  """All programs, for a replay that is not there yet."""
  memory, shapes = run.learner.memory, run.learner.replay_shapes()
  groups, share = batch_of(run.experiment)

  def keys(turn):
    return jax.random.split(jax.random.fold_in(jax.random.key(0), turn), groups)

  def add(state, new, turn):
    return memory.add(state, jnp.arange(groups), new, keys(turn), turn)

  def sample(state, turn):
    return memory.sample(state, keys(turn), share)

  turn, error = np.int32(0), np.zeros((groups, share), np.float32)
  update = jax.jit(memory.set_priorities, donate_argnums=0)
  return Programs(*(program.compile() for program in (
      jax.jit(add, donate_argnums=0).lower(shapes, made, turn),
      jax.jit(sample).lower(shapes, turn),
      update.lower(shapes, error.astype(np.int32), error),
      run.learner.programs.learn.lower(state._replace(replay=shapes), turn, *NOTHING))))


def batch_of(experiment: Experiment) -> tuple[int, int]:
  """(groups, how much of a batch is drawn from each)."""
  groups = experiment.num_grad_shards
  return groups, experiment.replay.batch_size // groups


def timed(call: Callable, *args: Any) -> tuple[float, Any]:
  """The seconds that a call took until all it made was there, and that."""
  start = time.perf_counter()
  made = jax.block_until_ready(call(*args))
  return time.perf_counter() - start, made


def repeat(call: Callable, state: Any, seconds: float) -> tuple[list[float], Any]:
  """Medians of what call(state, turn) -> ([seconds of each part], state) says, and the last state.

  The first call is not counted.
  """
  found, turn = [], 0
  while len(found) <= LEAST_CALLS or np.sum(found[1:]) < seconds * len(found[0]):
    times, state = call(state, np.int32(turn))
    found, turn = [*found, times], turn + 1
  return [statistics.median(column) for column in zip(*found[1:], strict=True)], state


def measure(experiment: Experiment, seconds: float) -> Figures:
  """Fills a replay and measures it; for a process that has done nothing else.

  Raises:
    MemoryError: it does not fit; in one line.
  """
  quieten()
  host.prepare_host(experiment.placement)
  run = build.make_run(experiment)
  (device,), capacity = run.place.mesh.devices.flat, experiment.replay.capacity
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(run.learner.replay_shapes()))
  check_fits(size, device)
  state = run.initial_state()
  sharding = NamedSharding(run.place.mesh, PartitionSpec(AXIS))
  made = jax.device_put(random_experience(experiment), sharding)
  programs = compiled(run, state, made)
  before = memory_now(device)
  state = filled(run, programs, state, made)
  count = int(jnp.sum(state.replay.size))
  add, sample, update, step = measured(experiment, programs, state, made, seconds)
  return Figures(capacity, count, add * 1e3, experiment.batch_rows / add, sample * 1e3,
                 update * 1e3, step * 1e3, (sample + update) / step, size, size / capacity,
                 max(x.memory_analysis().temp_size_in_bytes for x in programs),
                 memory_peak(device), before, device.device_kind)


def filled(run: build.Run, programs: Programs, state: TrainState, made: Experience
           ) -> TrainState:
  """The state with a replay to which was added until it was full."""
  experiment, replay = run.experiment, run.learner.allocate(state).replay
  rows, steps = replay.ring.fresh.shape[1], experiment.unroll_length
  for turn in range(1 + max(-(-rows // steps),
                            -(-experiment.replay.capacity // experiment.batch_rows))):
    replay = jax.block_until_ready(programs.add(replay, made, np.int32(turn)))
  return state._replace(replay=replay)


def measured(experiment: Experiment, programs: Programs, state: TrainState, made: Experience,
             seconds: float) -> list[float]:
  """Returns seconds of adding, of sampling, of setting priorities, and of a gradient step.

  Args:
    experiment: with the sizes of batches.
    programs: of `compiled`.
    state: with a full replay; donated.
    made: what is added.
    seconds: for each part.
  """
  error = np.random.default_rng(1).random(batch_of(experiment), np.float32)
  steps = np.int32(experiment.replay.gradient_steps)

  def add(held, turn):
    took, held = timed(programs.add, held, made, turn)
    return [took], held

  def draw(held, turn):
    sampling, drawn = timed(programs.sample, held, turn)
    updating, held = timed(programs.update, held, drawn.place, error)
    return [sampling, updating], held

  def learn(state, turn):
    del turn
    took, (state, metrics) = timed(programs.learn, state, steps, *NOTHING)
    if int(metrics['sampled'][0]) != steps * experiment.replay.batch_size:
      raise AssertionError('the learner found nothing to draw')
    return [took / steps], state

  adding, held = repeat(add, state.replay, seconds)
  drawing, held = repeat(draw, held, seconds)
  learning, _ = repeat(learn, state._replace(replay=held), seconds)
  return [*adding, *drawing, *learning]


def check_fits(size: int, device: jax.Device) -> None:
  """Refuses a replay of so many bytes if there is no room for it.

  Raises:
    MemoryError: saying how much there is.
  """
  stats = device.memory_stats()
  room = (stats['bytes_limit'] - stats['bytes_in_use'] if stats else
          1024 * proc('/proc/meminfo', 'MemAvailable'))
  if size + SPARE > room:
    raise MemoryError(f'does not fit: it takes {size / 1e6:,.1f} MB, and {SPARE / 1e6:,.1f} MB '
                      f'are for the rest; {room / 1e6:,.1f} MB are available')


def memory_now(device: jax.Device) -> int:
  """Bytes in use on an accelerator; of the CPU, those of this process."""
  stats = device.memory_stats()
  return stats['bytes_in_use'] if stats else 1024 * proc('/proc/self/status', 'VmRSS')


def memory_peak(device: jax.Device) -> int:
  """The most that `memory_now` ever was."""
  stats = device.memory_stats()
  return stats['peak_bytes_in_use'] if stats else 1024 * proc('/proc/self/status', 'VmHWM')


def proc(path: str, name: str) -> int:
  """A number of kB that Linux gives."""
  return int(re.search(rf'^{name}:\s*(\d+) kB', Path(path).read_text(), re.MULTILINE)[1])


def quieten() -> None:
  """Leaves out what would disturb the table."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)


def prepare(experiment: Experiment, capacities: Sequence[str]) -> list[Experiment]:
  """An experiment for each capacity, checked.

  Raises:
    ValueError: in one line.
  """
  if not experiment.algorithm.learns_from_replay:
    raise ValueError(f'--config: loss.name is {experiment.loss_name}, which has no replay')
  for text in capacities:
    if not re.fullmatch(r'\d+', text):
      raise ValueError(f'--capacities: must be whole numbers, such as 100000,1000000; got {text!r}')
  return [of_capacity(experiment, int(text)) for text in capacities]


def work(results: Connection, config: Mapping[str, Any], seconds: float) -> None:
  """`measure`, in a process of its own: sends what was found, or what is wrong."""
  try:
    results.send(measure(resolve(config), seconds)._asdict())
  except MemoryError as error:
    results.send(dict(skipped=str(error)))
  except jax.errors.JaxRuntimeError as error:  # of an accelerator, that there is no memory
    results.send(dict(failed=str(error).splitlines()[0]))
  except ValueError as error:
    results.send(error)


def row(experiment: Experiment, seconds: float) -> dict[str, Any]:
  """What is found of one capacity; or why it is 'skipped', or 'failed'."""
  spawn = multiprocessing.get_context('spawn')
  here, there = spawn.Pipe(duplex=False)
  process = spawn.Process(target=work, args=(there, experiment.fields, seconds), daemon=True)
  process.start()
  there.close()  # the process has the only one: where it dies there is an end to what it sends
  try:
    found = here.recv()
  except EOFError:
    process.join()
    found = dict(failed=f'its process died, exit code {process.exitcode}; of too little memory?')
  process.join()
  if isinstance(found, ValueError):
    raise found
  return dict(capacity=experiment.replay.capacity) | found


def headline(experiment: Experiment) -> str:
  """What is measured."""
  options = experiment.replay
  return (f'{experiment.env.task}, {experiment.loss_name}: {experiment.env.num_envs} '
          f'environments x {experiment.unroll_length} rows at once, batches of '
          f'{options.batch_size}, {options.gradient_steps} gradient steps a call, '
          f'{options.eviction}')


def line(found: Mapping[str, Any]) -> str:
  """A row as a line of the table."""
  for why in ('skipped', 'failed'):
    if why in found:
      return f'{found["capacity"]:12,}  {why}: {found[why]}'
  return '  '.join(f'{found[field] / (1e6 if "MB" in head else 1):{form}}'
                   for head, (field, form) in COLUMNS.items())


def define_flags() -> flags.FlagValues:
  """Defines the script's own flags, beside those of a config."""
  values = flags.FlagValues()
  flags.DEFINE_list('capacities', ['100000', '1000000', '2000000'], 'Transitions.',
                    flag_values=values)
  flags.DEFINE_float('seconds', 3.0, 'For each part that is measured.', lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  return values


def benchmark(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  quieten()
  values, found = define_flags(), []
  if not any(re.match(r'--?config(=|$)', arg) for arg in argv[1:]):
    argv = [argv[0], DEFAULT, *argv[1:]]
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    experiment = resolve(config)
    experiments = prepare(experiment, values.capacities)
    print(headline(experiment))
    print('  '.join(f'{head:>{form[:form.index(".")].strip(",")}}'
                    for head, (_, form) in COLUMNS.items()), flush=True)
    for item in experiments:
      found.append(row(item, values.seconds))
      print(line(found[-1]), flush=True)
  except ValueError as error:
    print(f'replay: {error}', file=sys.stderr)
    return 2
  if values.json:
    Path(values.json).write_text(json.dumps(found, indent=2) + '\n')
  return int(any('failed' in item for item in found))


if __name__ == '__main__':
  sys.exit(benchmark(sys.argv))
