"""Measures what each formulation of podracer_jit/numerics/convolution.py gains in a network.

.venv/bin/python -m benchmarks.networks --network=impala_resnet --rows=160,640 --rounds=3

The figures are rows a second of a torso on 84x84x4 frames: forward, and with the gradient of all
parameters. The first variant has flax's own layers; each later variant adds one formulation. The
variants take turns, each in its own process on one core; figures are medians. With --groups=4, a
loop takes four batches one after the other, like the gradient groups of a learner.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from podracer_jit.agents import networks
from podracer_jit.numerics import convolution
from podracer_jit.runtime import host, placement

IMAGE_TORSOS = [name for name, torso in networks.TORSOS.items()
                if getattr(torso, 'needs_images', False)]
# Each variant adds the formulation that it is named after to the variant before it.
VARIANTS = ('flax', 'formulations', 'max_pool', 'chunks')


def take_out(missing: Sequence[str]) -> None:
  """Replaces the formulations that a variant lacks by those of JAX and flax."""
  if 'formulations' in missing:
    convolution.conv2d = lambda x, w, stride, padding='VALID': lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  if 'max_pool' in missing:
    convolution.max_pool = lambda x, window, stride: nn.max_pool(
        x, (window, window), (stride, stride), 'SAME')
  if 'chunks' in missing:
    convolution.in_chunks = lambda function, x, chunk_rows: function(x)


def measure(network: str, rows: int, groups: int, variant: str, seconds: float
            ) -> tuple[float, float]:
  """Measures one variant in this process, which must measure no other.

  Args:
    network: the name of a torso.
    rows: frames of a batch.
    groups: number of batches that a loop takes; 0: one batch without a loop.
    variant: a name in VARIANTS.
    seconds: measured time of each direction.

  Returns:
    Rows a second, forward and with the gradient.
  """
  take_out(VARIANTS[VARIANTS.index(variant) + 1:])
  host.prepare_host(placement.PlacementOptions(), deterministic=True)
  torso = networks.TORSOS[network]()
  batches = max(1, groups)
  obs = np.random.default_rng(0).integers(0, 256, (batches, rows, 4, 84, 84)).astype(np.uint8)
  params = torso.init(jax.random.key(0), obs[0, :1])

  def loss(params, obs):
    return jnp.sum(jnp.square(torso.apply(params, obs)))

  def rate(function):
    @jax.jit
    def run_batches(params, obs):
      if not groups:
        return function(params, obs[0])
      return lax.map(lambda batch: function(params, batch), obs)

    # The first call compiles; the second one fills caches and memory pools.
    for _ in range(2):
      jax.block_until_ready(run_batches(params, obs))

    times = []
    while sum(times) < seconds or len(times) < 3:
      start = time.perf_counter()
      jax.block_until_ready(run_batches(params, obs))
      times.append(time.perf_counter() - start)
    return batches * rows / statistics.median(times)

  return rate(torso.apply), rate(jax.grad(loss))


def main(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_enum('network', 'nature_cnn', IMAGE_TORSOS, 'The torso to measure.',
                    flag_values=values)
  flags.DEFINE_list('rows', ['160', '640'], 'Batch sizes to measure.', flag_values=values)
  flags.DEFINE_integer('groups', 0, 'Batches in a loop; 0: one batch without a loop.',
                       lower_bound=0, flag_values=values)
  flags.DEFINE_float('seconds', 3.0, 'Measured time of each variant and direction.',
                     flag_values=values)
  flags.DEFINE_integer('rounds', 3, 'Measurements of each variant.', flag_values=values)
  flags.DEFINE_enum('only', None, VARIANTS,
                    'Measures this variant in this process, with the first of --rows.',
                    flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  try:
    values(argv)
    sizes = [int(x) for x in values.rows]
  except (flags.Error, ValueError) as error:
    print(f'networks: {error}', file=sys.stderr)
    return 2
  if values.only:
    print(json.dumps(measure(values.network, sizes[0], values.groups, values.only,
                             values.seconds)))
    return 0

  core = min(os.sched_getaffinity(0))
  rounds = {(rows, variant): [] for rows in sizes for variant in VARIANTS}
  for _ in range(values.rounds):
    for (rows, variant), figures in rounds.items():
      command = [sys.executable, '-m', 'benchmarks.networks', f'--network={values.network}',
                 f'--rows={rows}', f'--groups={values.groups}', f'--seconds={values.seconds}',
                 f'--only={variant}']
      out = subprocess.run(command, check=True, capture_output=True, text=True,
                           preexec_fn=lambda: os.sched_setaffinity(0, {core})).stdout
      figures.append(json.loads(out.splitlines()[-1]))

  medians = {key: [statistics.median(direction) for direction in zip(*figures, strict=True)]
             for key, figures in rounds.items()}
  for (rows, variant), (forward, gradient) in medians.items():
    speedup = gradient / medians[rows, VARIANTS[0]][1]
    print(f'{values.network} {rows:5} rows  {variant:14} forward {forward:7,.0f}  gradient '
          f'{gradient:7,.0f}  {speedup:5.2f} times')
  if values.json:
    table = [dict(rows=rows, variant=variant, forward=forward, gradient=gradient,
                  rounds=rounds[rows, variant])
             for (rows, variant), (forward, gradient) in medians.items()]
    with open(values.json, 'w') as file:
      json.dump(table, file, indent=2)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
