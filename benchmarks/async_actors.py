"""Rollouts of the first environments that are ready, and of all of them by shards in turn.

.venv/bin/python -m benchmarks.async_actors --config=configs/pong_laptop.py \
    --config.env.noop_max=30 --config.env.max_episode_steps=20 --config.env.num_envs=32 \
    --batches=4,8,16 --shards=1,2,4

Takes --config and its overrides as training does. One actor makes rollouts, nothing learns:
asynchronously with each env_batch of --batches, and in turn with each number of --shards; always
with the same environments, network and unroll length. EnvPool's threads are the visible cores,
shared by the shards. With resets that cost many frames and short episodes, as above, step times are
uneven; how uneven is measured first, in a pool of one environment (an unusually long step may also
be another program's turn on the core: resets are given apart).

All are built once and measured in turn, --rounds of --seconds each; figures are medians of valid
agent steps a second.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags, logging

from podracer_jit.envs import envpool_envs
from podracer_jit.run import build, command_line
from podracer_jit.run.experiment import Experiment
from podracer_jit.run.measure import timed_parts
from podracer_jit.run.resolve import changed, resolve
from podracer_jit.runtime import host


def step_times(experiment: Experiment, steps: int) -> dict[str, float]:
  """Of one environment with random actions: milliseconds a step, and of resets alone."""
  pool = envpool_envs.make_pool(experiment.env.task, experiment.env_options, [experiment.seed],
                                num_threads=1)
  space, draws, taken, resets = pool.action_space, np.random.default_rng(0), [], []
  pool.reset()
  over = np.zeros(1, bool)
  for _ in range(steps):
    if hasattr(space, 'n'):
      action = draws.integers(space.n, size=1, dtype=np.int32)
    else:
      action = draws.uniform(space.low, space.high, (1, *space.shape)).astype(space.dtype)
    start = time.perf_counter()
    _, _, terminated, truncated, _ = pool.step(action)
    taken.append(1e3 * (time.perf_counter() - start))
    if over[0]:
      resets.append(taken[-1])
    over = terminated | truncated
  pool.close()
  return dict(mean=float(np.mean(taken)), p50=float(np.median(taken)),
              p99=float(np.percentile(taken, 99)), max=max(taken), resets=len(resets) / steps,
              reset_p50=float(np.median(resets)) if resets else 0.0)


def cases(experiment: Experiment, batches: Sequence[int], shards: Sequence[int]
          ) -> dict[str, Experiment]:
  """The experiments to compare, by name."""
  place = dict(actor_devices=(0,), learner_devices=(0,), actors_per_device=1, env_threads=0)
  own = dict(scheme='sync', placement=place, num_grad_shards=1)
  return ({f'sync {n}': changed(experiment, **own, num_shards=n, env_batch=0) for n in shards}
          | {f'async {n}': changed(experiment, **own, num_shards=1, env_batch=n)
             for n in batches})


def measure(experiments: Mapping[str, Experiment], seconds: float, rounds: int
            ) -> dict[str, list[float]]:
  """Steps a second of each, by round."""
  found = {name: [] for name in experiments}
  with contextlib.ExitStack() as stack:
    measures = {}
    for name, experiment in experiments.items():
      run = build.make_run(experiment)
      measures[name] = timed_parts.rollout(run, run.initial_state(), False, stack)
      measures[name](0.0)  # compiles; an asynchronous one has begun sequences after it
    for _ in range(rounds):
      for name in experiments:
        found[name].append(measures[name](seconds).sps)
  return found


def main(argv: Sequence[str]) -> int:
  """Runs the script; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  logging.set_verbosity(logging.ERROR)
  values = flags.FlagValues()
  flags.DEFINE_list('batches', ['4', '8', '16'], 'Of env_batch.', flag_values=values)
  flags.DEFINE_list('shards', ['1', '2', '4'], 'Of num_shards.', flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'Of measurements.', lower_bound=1, flag_values=values)
  flags.DEFINE_float('seconds', 5.0, 'Of each in a round.', lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer('steps', 3000, 'To measure step times by.', lower_bound=1,
                       flag_values=values)
  flags.DEFINE_string('json', None, 'Write all figures here.', flag_values=values)
  try:
    config = command_line.parse(argv, values)
    if config is None:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    if not values.shards:
      raise ValueError('--shards: must name one at least, to compare with')
    experiment = resolve(config)
    experiments = cases(experiment, [int(n) for n in values.batches],
                        [int(n) for n in values.shards])
    host.prepare_host(next(iter(experiments.values())).placement)
    times = step_times(experiment, values.steps)
    print('a step of one environment: mean {mean:.3f} ms, p50 {p50:.3f}, p99 {p99:.3f}, max '
          '{max:.3f}; {resets:.1%} are resets, p50 {reset_p50:.3f}'.format(**times), flush=True)
    found = measure(experiments, values.seconds, values.rounds)
  except ValueError as error:
    print(f'async_actors: {error}', file=sys.stderr)
    return 2
  best = max(statistics.median(rates) for name, rates in found.items() if name.startswith('sync'))
  print('actor            SPS  to best sync  rounds')
  for name, rates in found.items():
    sps = statistics.median(rates)
    print(f'{name:9} {sps:10,.0f} {sps / best:13.2f}  {" ".join(f"{x:,.0f}" for x in rates)}')
  if values.json:
    Path(values.json).write_text(json.dumps(dict(step_ms=times, sps=found), indent=2) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
