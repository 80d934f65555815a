"""Measurements of `benchmarks.gpu_day`; each runs in a process of its own and prints records.

python -m benchmarks.gpu_day.measurements [--dry] --work=FOLDER -- KIND [ARGUMENTS]
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_day.processes import RESULT
from benchmarks.parts import __main__ as parts_benchmark
from podracer_jit.envs import envpool_envs

PACKAGES = ('jax', 'jaxlib', 'jax-cuda13-plugin', 'numpy', 'flax', 'optax', 'rlax', 'chex',
            'orbax-checkpoint', 'envpool', 'gymnasium', 'gymnax', 'nvidia-cudnn-cu13',
            'nvidia-cublas', 'nvidia-nccl-cu13')
# Events of the project in a trace.
OUR_EVENTS = re.compile(r'rollout$|learn$|make: |transfer: |wait: ')
TRANSFER_BYTES = 50_000_000
NATURE_WEIGHTS = ((8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (3136, 512))
NATURE_STRIDES = (4, 2, 1)


def say(**data: Any) -> None:
  """Prints a record, which the parent process collects."""
  print(RESULT + json.dumps(data, default=str), flush=True)


def seconds_of(function: Callable[..., Any], *args: Any, calls: int = 20) -> float:
  """Returns the seconds of a call, as a mean; the first call is not counted."""
  jax.block_until_ready(function(*args))
  start = time.perf_counter()
  for _ in range(calls):
    result = function(*args)
  jax.block_until_ready(result)
  return (time.perf_counter() - start) / calls


def failure(error: BaseException) -> str:
  """Returns an error in one line."""
  return f'{type(error).__name__}: {str(error)[:800]}'


# The first step.


def probe(dry: bool, work: Path) -> None:
  """Prints versions and devices, then what single operations cost."""
  del work
  start = time.monotonic()
  jax.config.update('jax_num_cpu_devices', 2)
  versions = {}
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  say(versions=versions, python=sys.version.split()[0], cores=len(os.sched_getaffinity(0)))
  device = jax.devices()[0]
  if not dry and device.platform != 'gpu':
    raise SystemExit(f'no GPU: {jax.devices()}')
  cpu = jax.local_devices(backend='cpu')[0]
  listed = '' if dry else subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True,
                                         check=False).stdout
  say(default=jax.default_backend(), devices=jax.devices(),
      cpus=jax.local_devices(backend='cpu'), kind=device.device_kind,
      memory=device.memory_stats(), smi=listed, started_s=round(time.monotonic() - start, 1))

  size = 256 if dry else 4096
  sections = {
      'matmul': lambda: matmul(device, size),
      'loop_costs_us': lambda: loop_costs_us(100 if dry else 2000),
      'transfers': lambda: transfers(cpu, device, size, 3 if dry else 400),
      'envpool_call': lambda: envpool_call(cpu, device)}
  for name, section in sections.items():
    try:
      say(**{name: section()})
    except Exception as error:  # noqa: BLE001 - the other sections still tell something
      say(**{name: {'failed': failure(error)}})


def matmul(device: jax.Device, size: int) -> dict[str, Any]:
  """Returns TFLOPS and relative errors of products of square matrices."""
  a, b = (jax.device_put(np.random.default_rng(seed).standard_normal((size, size), np.float32),
                         device) for seed in (0, 1))
  exact = np.asarray(a[:64], np.float64) @ np.asarray(b, np.float64)

  def tflops(seconds: float) -> float:
    return round(2 * size**3 / seconds / 1e12, 2)

  figures: dict[str, Any] = {}
  for precision in ('default', 'highest'):
    product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
    error = np.linalg.norm(np.asarray(product(a, b)[:64]) - exact) / np.linalg.norm(exact)
    figures[precision] = dict(tflops=tflops(seconds_of(product, a, b)), error=float(error))
  half = [x.astype(jnp.bfloat16) for x in (a, b)]
  figures['bf16_tflops'] = tflops(seconds_of(jax.jit(jnp.matmul), *half))
  return figures


def loop_costs_us(turns: int) -> dict[str, float]:
  """Returns the microseconds of one turn of a loop, with 1, 4 and 20 kernels and with a branch."""
  def cost(body: Callable) -> float:
    loop = jax.jit(lambda x: lax.fori_loop(0, turns, body, x))
    return seconds_of(loop, jnp.zeros(64), calls=3) / turns * 1e6

  def with_kernels(count: int) -> Callable:
    def body(t, x):
      for _ in range(count):
        x = lax.optimization_barrier(jnp.sin(x) + t)
      return x
    return body

  def with_branch(t, x):
    return lax.cond(t > 0, jnp.cos, lambda x: x + 1, jnp.sin(x))

  return dict(kernels_1=cost(with_kernels(1)), kernels_4=cost(with_kernels(4)),
              kernels_20=cost(with_kernels(20)), with_cond=cost(with_branch))


def transfers(cpu: jax.Device, device: jax.Device, size: int, products: int) -> dict[str, Any]:
  """Returns the speed of transfers, and whether one of an uncomputed array blocks.

  Args:
    cpu: a CPU device.
    device: the GPU.
    size: rows of the square matrix that is computed meanwhile.
    products: how many times it is multiplied.
  """
  on_cpu, on_device = (jax.device_put(np.zeros(TRANSFER_BYTES, np.uint8), where)
                       for where in (cpu, device))
  jax.block_until_ready((on_cpu, on_device))

  def to_cpu(tree: Any) -> Any:
    return jax.device_put(tree, cpu, may_alias=False)

  def gigabytes_a_second(seconds: float) -> float:
    return round(TRANSFER_BYTES / 1e9 / seconds, 2)

  small = jax.device_put([np.zeros(64, np.float32)] * 20, device)
  to_device_s = seconds_of(lambda: jax.device_put(on_cpu, device), calls=5)
  figures = dict(cpu_to_gpu_gbs=gigabytes_a_second(to_device_s),
                 gpu_to_cpu_gbs=gigabytes_a_second(seconds_of(to_cpu, on_device, calls=5)),
                 tree_of_20_to_cpu_us=round(seconds_of(to_cpu, small) * 1e6, 1))

  # Does a transfer of an array that is not computed yet return at once, and does it hold the GIL?
  slow = jax.jit(lambda a: lax.fori_loop(0, products, lambda _, a: jnp.tanh(a @ a), a))
  ones = jax.device_put(jnp.ones((size, size)), device)
  figures['slow_s'] = seconds_of(slow, ones, calls=1)
  ticks = 0
  end = threading.Event()

  def count_ticks() -> None:
    nonlocal ticks
    while not end.is_set():
      ticks += 1
      time.sleep(0.001)

  thread = threading.Thread(target=count_ticks)
  uncomputed = slow(ones)
  thread.start()
  start = time.perf_counter()
  moved = to_cpu(uncomputed)
  figures['put_of_uncomputed_returns_after_s'] = time.perf_counter() - start
  end.set()
  thread.join()
  jax.block_until_ready(moved)
  return figures | dict(ticks_meanwhile=ticks)


def envpool_call(cpu: jax.Device, device: jax.Device) -> dict[str, Any]:
  """Returns the cost of EnvPool's steps in a program of each device, and whether they agree."""
  steps = 100
  num_envs = 8
  actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs)).astype(np.int32)
  observations = []
  figures: dict[str, Any] = {}
  for where in (cpu, device):
    env = envpool_envs.make_vector_env('CartPole-v1', {}, list(range(num_envs)), 2)

    def play(token, actions, env=env):
      def body(t, carry):
        token, seen = carry
        token, _ = env.send(token, None, actions[t])
        token, _, step = env.recv(token, None)
        return token, seen.at[t].set(step.obs)
      return lax.fori_loop(0, steps, body, (token, jnp.zeros((steps, num_envs, 4))))

    args = jax.device_put((env.handle, actions), where)
    program = jax.jit(play).lower(*args).compile()
    start = time.perf_counter()
    result = program(*args)
    called_s = time.perf_counter() - start
    jax.block_until_ready(result)
    total_s = time.perf_counter() - start
    observations.append(np.asarray(result[1]))
    figures[where.platform] = dict(us_a_step=round(total_s / steps * 1e6, 1),
                                   call_returns_after_share=round(called_s / total_s, 2))
    del program
    env.close()
  return figures | dict(equal=bool(np.array_equal(*observations)),
                        finite=bool(np.isfinite(observations[-1]).all()))


# Benchmarks of configs.


def bench(dry: bool, work: Path, *arguments: str) -> None:
  """Runs `benchmarks.parts` several times in this process.

  Args:
    dry: not used.
    work: the folder for the figures.
    *arguments: those of each run, divided by '+'.
  """
  del dry
  runs: list[list[str]] = [[]]
  for argument in arguments:
    if argument == '+':
      runs.append([])
    else:
      runs[-1].append(argument)
  for i, run in enumerate(runs):
    start = time.monotonic()
    try:
      figures = _figures(run, work / f'bench_{os.getpid()}_{i}.json')
    except BaseException as error:  # noqa: BLE001 - SystemExit, too; the next runs still tell
      figures = dict(failed=failure(error))
    say(args=run, **figures, took_s=round(time.monotonic() - start, 1))


def _figures(flags: Sequence[str], path: Path) -> dict[str, Any]:
  """Runs one benchmark, which writes its figures to `path`; returns the most important ones."""
  code = parts_benchmark.main(['parts', *flags, f'--json={path}'])
  if code:
    raise RuntimeError(f'exit code {code}')
  result = json.loads(path.read_text())
  memory = jax.devices()[0].memory_stats() or {}
  parts = result['parts'].items()
  return dict(sps={name: round(part['sps']) for name, part in parts},
              ms={name: round(1e3 * part['seconds_per_update'], 2) for name, part in parts},
              derived=result['derived'], actors=result['machine']['actors'][:2],
              env_threads=result['machine']['env_threads'],
              peak_gpu_gb=round(memory.get('peak_bytes_in_use', 0) / 1e9, 2))


def anakin(dry: bool, work: Path, sizes: str) -> None:
  """Measures environments that are JAX functions in one program.

  Args:
    dry: measures as short as possible.
    work: the folder for the figures.
    sizes: numbers of environments, by comma.
  """
  for num_envs in sizes.split(','):
    bench(dry, work, '--config=ppo_cartpole', '--config.env.task=gymnax:CartPole-v1',
          f'--config.env.num_envs={num_envs}', '--config.unroll_length=32',
          '--config.num_epochs=1', '--config.placement.updates_per_call=4', '--parts=fused',
          '--rounds_of=', f'--seconds={0 if dry else 2}', '--rounds=1')


# Traces and single layers.


def busy(dry: bool, work: Path, folder: str) -> None:
  """Prints the share of a trace in which the GPU was busy, and times of the project's events.

  Args:
    dry: not used.
    work: not used.
    folder: has the trace.
  """
  del dry, work
  for path in Path(folder).rglob('*.trace.json.gz'):
    with gzip.open(path) as file:
      say(file=path.name, **busy_share(json.load(file)['traceEvents']))


def busy_share(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the figures of one trace, from its events in Chrome's format."""
  processes = {event['pid']: event['args'].get('name', '') for event in events
               if event.get('name') == 'process_name'}
  complete = [event for event in events if event.get('ph') == 'X']
  spans = sorted((event['ts'], event['ts'] + event.get('dur', 0)) for event in complete
                 if 'GPU' in processes.get(event['pid'], ''))
  busy_us = 0.0
  last_end = 0.0
  for start, end in spans:
    busy_us += max(0.0, end - max(start, last_end))
    last_end = max(last_end, end)
  count_and_ms: dict[str, tuple[int, float]] = {}
  for event in complete:
    if OUR_EVENTS.match(event.get('name', '')):
      count, total_ms = count_and_ms.get(event['name'], (0, 0.0))
      count_and_ms[event['name']] = (count + 1, total_ms + event.get('dur', 0) / 1e3)
  span_us = last_end - spans[0][0] if spans else 0.0
  return dict(gpu_events=len(spans), span_ms=round(span_us / 1e3, 2),
              gpu_busy_share=round(busy_us / span_us, 3) if span_us else None,
              ours_count_ms={name: (count, round(ms, 2))
                             for name, (count, ms) in count_and_ms.items()})


def bf16(dry: bool, work: Path) -> None:
  """Prints rows a second of the Nature CNN, forward and backward, in float32 and in bfloat16."""
  del work

  def loss(weights, x):
    for kernel, stride in zip(weights[:3], NATURE_STRIDES, strict=True):
      x = jax.nn.relu(lax.conv_general_dilated(
          x, kernel, (stride, stride), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')))
    return jnp.sum(jnp.tanh(x.reshape(len(x), -1) @ weights[3]).astype(jnp.float32))

  for rows in (2,) if dry else (160, 640, 2560):
    figures = {}
    for dtype in (jnp.float32, jnp.bfloat16):
      weights = [jnp.full(shape, 0.01, dtype) for shape in NATURE_WEIGHTS]
      frames = jax.random.randint(jax.random.key(0), (rows, 84, 84, 4), 0, 255).astype(dtype) / 255
      seconds = seconds_of(jax.jit(jax.grad(loss)), weights, frames)
      figures[dtype.__name__] = round(rows / seconds)
    say(rows=rows, rows_a_second=figures)


KINDS = {function.__name__: function for function in (probe, bench, anakin, busy, bf16)}


def main() -> int:
  """Runs one measurement; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--dry', action='store_true')
  parser.add_argument('--work', type=Path, required=True)
  parser.add_argument('kind', choices=KINDS)
  parser.add_argument('arguments', nargs='*')
  args = parser.parse_args()
  KINDS[args.kind](args.dry, args.work, *args.arguments)
  return 0


if __name__ == '__main__':
  sys.exit(main())
