"""Compares the speed of asynchronous rollouts with rollouts of shards that take turns.

.venv/bin/python -m benchmarks.async_actors --config=configs/pong_laptop.py \
    --config.env.noop_max=30 --config.env.max_episode_steps=20 --config.env.num_envs=32 \
    --batches=4,8,16 --shards=1,2,4

Takes --config and its overrides, like training. One actor makes rollouts, and nothing learns.
Each env_batch of --batches is an asynchronous case, which takes the first environments that are
ready. Each number of --shards is a case that takes the shards in turn. Environments, network and
unroll length are the same in all cases. EnvPool has a thread for each visible core, shared by the
shards.

Asynchronous rollouts gain if step times are uneven, for example if episodes are short and a reset
takes many frames, as above. The script therefore first measures the step times of one environment.
It reports resets separately, since a long step may also be another program's turn on the core.

All cases are built once and measured in turn, --rounds of --seconds each. Figures are medians of
valid agent steps a second.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from benchmarks.common import parse_config
from benchmarks.parts import timed_parts
from podracer_jit.envs import envpool_envs
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime import host


def step_times(experiment: Experiment, steps: int) -> dict[str, float]:
  """Measures one environment with random actions.

  Returns:
    Milliseconds of a step (mean, p50, p99, max), the share of steps that are resets, and the median
    milliseconds of a reset.
  """
  pool = envpool_envs.make_pool(experiment.env.task, experiment.env_options, [experiment.seed],
                                num_threads=1)
  space = pool.action_space
  rng = np.random.default_rng(0)
  step_ms = []
  reset_ms = []
  pool.reset()
  episode_ended = np.zeros(1, bool)
  for _ in range(steps):
    if hasattr(space, 'n'):
      action = rng.integers(space.n, size=1, dtype=np.int32)
    else:
      action = rng.uniform(space.low, space.high, (1, *space.shape)).astype(space.dtype)
    start = time.perf_counter()
    _, _, terminated, truncated, _ = pool.step(action)
    step_ms.append(1e3 * (time.perf_counter() - start))
    # EnvPool resets an environment in the first step after its episode ended.
    if episode_ended[0]:
      reset_ms.append(step_ms[-1])
    episode_ended = terminated | truncated
  pool.close()
  return dict(mean=float(np.mean(step_ms)), p50=float(np.median(step_ms)),
              p99=float(np.percentile(step_ms, 99)), max=max(step_ms),
              resets=len(reset_ms) / steps,
              reset_p50=float(np.median(reset_ms)) if reset_ms else 0.0)


def cases(experiment: Experiment, batches: Sequence[int], shards: Sequence[int]
          ) -> dict[str, Experiment]:
  """Returns the experiments to compare, by name."""
  place = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1, env_threads=0)
  common = dict(scheme='sync', placement=place, num_grad_shards=1)
  in_turn = {f'sync {n}': changed(experiment, **common, num_shards=n, env_batch=0)
             for n in shards}
  asynchronous = {f'async {n}': changed(experiment, **common, num_shards=1, env_batch=n)
                  for n in batches}
  return in_turn | asynchronous


def measure(experiments: Mapping[str, Experiment], seconds: float, rounds: int
            ) -> dict[str, list[float]]:
  """Returns the steps a second of each experiment, one figure per round."""
  rates = {name: [] for name in experiments}
  with contextlib.ExitStack() as stack:
    measures = {}
    for name, experiment in experiments.items():
      run = build.make_run(experiment)
      measures[name] = timed_parts.rollout(run, run.initial_state(), False, stack)
      # The first call compiles. It also leaves unfinished sequences in an asynchronous case, like
      # every later call.
      measures[name](0.0)
    for _ in range(rounds):
      for name in experiments:
        rates[name].append(measures[name](seconds).sps)
  return rates


def main(argv: Sequence[str]) -> int:
  """Runs the script; returns its exit code."""
  values = flags.FlagValues()
  flags.DEFINE_list('batches', ['4', '8', '16'], 'Values of env_batch.', flag_values=values)
  flags.DEFINE_list('shards', ['1', '2', '4'], 'Values of num_shards.', flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'Measurements of each case.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_float('seconds', 5.0, 'Seconds of one measurement.', lower_bound=0.0,
                     flag_values=values)
  flags.DEFINE_integer('steps', 3000, 'Steps of one environment to measure step times.',
                       lower_bound=1, flag_values=values)
  flags.DEFINE_string('json', None, 'A file for all figures.', flag_values=values)
  try:
    config = parse_config(argv, values, __doc__)
    if config is None:
      return 0
    if not values.shards:
      raise ValueError('--shards: needs at least one number, to compare with')
    experiment = resolve(config)
    experiments = cases(experiment, [int(n) for n in values.batches],
                        [int(n) for n in values.shards])
    host.prepare_host(next(iter(experiments.values())).placement, experiment.numerics.deterministic)
    times = step_times(experiment, values.steps)
    print('a step of one environment: mean {mean:.3f} ms, p50 {p50:.3f}, p99 {p99:.3f}, max '
          '{max:.3f}; {resets:.1%} are resets, p50 {reset_p50:.3f}'.format(**times), flush=True)
    measured = measure(experiments, values.seconds, values.rounds)
  except ValueError as error:
    print(f'async_actors: {error}', file=sys.stderr)
    return 2
  best = max(statistics.median(rates) for name, rates in measured.items()
             if name.startswith('sync'))
  print('actor            SPS  to best sync  rounds')
  for name, rates in measured.items():
    sps = statistics.median(rates)
    print(f'{name:9} {sps:10,.0f} {sps / best:13.2f}  {" ".join(f"{x:,.0f}" for x in rates)}')
  if values.json:
    figures = dict(step_ms=times, sps=measured)
    Path(values.json).write_text(json.dumps(figures, indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
