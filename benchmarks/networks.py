"""What each formulation of podracer_jit/numerics/convolution.py does to networks.

.venv/bin/python -m benchmarks.networks --network=impala_resnet --rows=160,640 --rounds=3

Rows a second, forward and with the gradient of all parameters, of a torso on 84x84x4 frames. The
variants begin with flax's own layers and add one thing after another; each is measured in processes
of its own, in turn, pinned to one core. Medians. With --groups=4 four batches of so many rows go
through one after the other, in a loop, as a learner's gradient groups do.
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
# In this order; each has what those before it have.
VARIANTS = ('flax', 'formulations', 'max_pool', 'chunks')


def take_out(missing: Sequence[str]) -> None:
  """Puts JAX's and flax's own in the place of what a variant does not have."""
  if 'formulations' in missing:
    convolution.conv2d = lambda x, w, stride, padding='VALID': lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  if 'max_pool' in missing:
    convolution.max_pool = lambda x, window, stride: nn.max_pool(
        x, (window, window), (stride, stride), 'SAME')
  if 'chunks' in missing:
    convolution.in_chunks = lambda function, x, near: function(x)


def measure(network: str, rows: int, groups: int, variant: str, seconds: float
            ) -> tuple[float, float]:
  """Rows a second of one variant, forward and with the gradient."""
  take_out(VARIANTS[VARIANTS.index(variant) + 1:])
  host.prepare_host(placement.PlacementOptions())
  torso = networks.TORSOS[network]()
  batches = max(1, groups)
  obs = np.random.default_rng(0).integers(0, 256, (batches, rows, 4, 84, 84)).astype(np.uint8)
  params = torso.init(jax.random.key(0), obs[0, :1])

  def loss(params, obs):
    return jnp.sum(jnp.square(torso.apply(params, obs)))

  def rate(function):
    @jax.jit
    def of_all(params, obs):
      if not groups:
        return function(params, obs[0])
      return lax.map(lambda one: function(params, one), obs)

    times = []
    for _ in range(2):
      jax.block_until_ready(of_all(params, obs))
    while sum(times) < seconds or len(times) < 3:
      start = time.perf_counter()
      jax.block_until_ready(of_all(params, obs))
      times.append(time.perf_counter() - start)
    return batches * rows / statistics.median(times)

  return rate(torso.apply), rate(jax.grad(loss))


def main(argv: Sequence[str]) -> int:
  """Measures and prints; returns the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_enum('network', 'nature_cnn', IMAGE_TORSOS, 'Which.', flag_values=values)
  flags.DEFINE_list('rows', ['160', '640'], 'Rows of a batch; several.', flag_values=values)
  flags.DEFINE_integer('groups', 0, 'Batches one after the other in a loop; 0: one, without.',
                       lower_bound=0, flag_values=values)
  flags.DEFINE_float('seconds', 3.0, 'Measured time of each.', flag_values=values)
  flags.DEFINE_integer('rounds', 3, 'Times that each is measured.', flag_values=values)
  flags.DEFINE_enum('only', None, VARIANTS, 'Of the first of rows, measured in this process.',
                    flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
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
  found = {(rows, variant): [] for rows in sizes for variant in VARIANTS}
  for _ in range(values.rounds):
    for (rows, variant), figures in found.items():
      out = subprocess.run(
          [sys.executable, '-m', 'benchmarks.networks', f'--network={values.network}',
           f'--rows={rows}', f'--groups={values.groups}', f'--seconds={values.seconds}',
           f'--only={variant}'],
          check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(
              0, {core})).stdout
      figures.append(json.loads(out.splitlines()[-1]))
  table = {key: [statistics.median(x) for x in zip(*figures, strict=True)]
           for key, figures in found.items()}
  for (rows, variant), (forward, gradient) in table.items():
    print(f'{values.network} {rows:5} rows  {variant:14} forward {forward:7,.0f}  gradient '
          f'{gradient:7,.0f}  {gradient / table[rows, VARIANTS[0]][1]:5.2f} times')
  if values.json:
    with open(values.json, 'w') as file:
      json.dump([dict(rows=rows, variant=variant, forward=x[0], gradient=x[1], rounds=found[
          rows, variant]) for (rows, variant), x in table.items()], file, indent=2)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
