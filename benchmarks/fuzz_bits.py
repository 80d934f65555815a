"""Searches for experiments whose bits depend on where or how they run.

.venv/bin/python -m benchmarks.fuzz_bits --first=1 --count=100 [--updates=60] [--isa=AVX2]

The random seed n gives experiment n: algorithm, network, core, normalisers, optimizer, odd sizes,
1 to 4 groups. The script runs each experiment with three random ones of the schemes and placements
that must agree (`benchmarks.agreement`), and compares their receipts. If they differ, it simplifies
the experiment as long as the receipts still differ. Then it prints the smallest experiment, its
first different update and the islands that had other results for equal arguments.

--isa: the newest CPU instructions that XLA may use: SSE4_2, AVX, AVX2 or AVX512.
--xla_threads: the size of XLA's thread pool.
Exit code: 0 no difference, 1 some experiments differ.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import agreement
from podracer_jit import experiment
from podracer_jit.experiment.resolve import resolve

DISCRETE = ('CartPole-v1', 'Catch-v0', 'Acrobot-v1')
CONTINUOUS = ('Pendulum-v1',)
# The tasks that an algorithm can learn.
TASKS = {
    'ppo': DISCRETE + CONTINUOUS, 'impala': DISCRETE + CONTINUOUS, 'pqn': DISCRETE, 'dqn': DISCRETE,
    'r2d2': DISCRETE, 'dpg': CONTINUOUS, 'sac': CONTINUOUS, 'td3': CONTINUOUS}
PIXELS = dict(task='Pong-v5', img_height=42, img_width=42, max_episode_steps=12, noop_max=4)


def draw(number: int) -> dict[str, Any]:
  """Returns experiment `number`, as nested dicts; the same number gives the same experiment."""
  rng = random.Random(number)
  while True:
    config = _draw(rng)
    try:
      for lag in (0, 1):
        for way in agreement.variants(config, lag):
          resolve(copy.deepcopy(config) | dict(scheme=way.scheme))
      return config
    except ValueError:
      continue  # these parts cannot be combined


def _draw(rng: random.Random) -> dict[str, Any]:
  """Draws an experiment, which may be invalid."""
  loss = rng.choice([*TASKS, 'ppo', 'impala'])  # these two twice as often
  pixels = TASKS[loss] != CONTINUOUS and rng.random() < 0.1
  network = 'deterministic' if loss == 'dpg' else (
      rng.choice(['nature_cnn', 'impala_resnet']) if pixels else 'mlp')
  config = experiment.config(loss, network, rng.choice(['adam', 'rmsprop', 'centred_rmsprop'])
                             ).to_dict()
  groups = rng.choice([1, 2, 3, 4])
  num_shards = rng.choice([n for n in (1, 2, 3, 4) if groups % n == 0 or n % groups == 0])
  # The number of environments must be a multiple of both.
  divisor = math.lcm(groups, num_shards)
  config['env'] |= PIXELS if pixels else dict(task=rng.choice(TASKS[loss]))
  config['env']['num_envs'] = divisor * rng.choice([1, 2, 3, 5] if pixels else [2, 3, 5, 7, 16])
  config |= dict(
      seed=rng.randrange(1000), num_shards=num_shards, num_grad_shards=groups,
      unroll_length=rng.choice([4, 7] if pixels else [5, 8, 13, 32]), total_steps=10**6,
      microbatch_rows=rng.choice([0, 0, 24]))
  _draw_optimizer(rng, config, loss)
  if pixels:
    config['network'] |= dict(channels=(8, 16), hidden=32) | (
        dict(kernels=(4, 3), strides=(4, 1)) if network == 'nature_cnn' else {})
  elif network == 'mlp':
    config['network']['hidden'] = rng.choice([(5,), (64, 64), (33, 17), (128, 8)])
  else:
    config['network'] |= dict(actor_hidden=(rng.choice([9, 32]), 16), critic_hidden=(33, 16))
  if loss in ('ppo', 'impala', 'pqn'):
    _draw_rollout_algorithm(rng, config, loss)
  else:
    _draw_replay(rng, config, loss, groups)
  return config


def _draw_optimizer(rng: random.Random, config: dict[str, Any], loss: str) -> None:
  config['optimizer'] |= dict(max_grad_norm=rng.choice([0.5, 40.0]), anneal=rng.random() < 0.5,
                              learning_rate=rng.choice([1e-4, 1e-3]))
  if loss == 'ppo' and rng.random() < 0.25:
    config['optimizer'] |= dict(kl_target=0.01, anneal=False)


def _draw_rollout_algorithm(rng: random.Random, config: dict[str, Any], loss: str) -> None:
  config['network'] |= dict(core=rng.choice(['none', 'none', 'gru', 'lstm']),
                            core_size=rng.choice([8, 17]))
  if loss != 'pqn':
    config['network']['separate_critic'] = rng.random() < 0.3
  config['normalise'] |= dict(obs=rng.random() < 0.4, reward=rng.random() < 0.4,
                              value=loss == 'ppo' and rng.random() < 0.4)
  config['num_minibatches'] = rng.choice([1, 2, 3])
  if loss in ('ppo', 'pqn'):
    config['num_epochs'] = rng.choice([1, 2, 3])
  if loss == 'ppo':
    config['loss'] |= dict(vtrace=rng.random() < 0.3, clip_value=rng.random() < 0.3)
  if loss == 'pqn':
    config['loss'] |= dict(trace_lambda=rng.choice([0.0, 0.65, 0.95]),
                           epsilon=rng.choice([0.05, 'linear:1:0.05:0.1']))


def _draw_replay(rng: random.Random, config: dict[str, Any], loss: str, groups: int) -> None:
  share = config['env']['num_envs'] // groups
  config['replay'] |= dict(
      capacity=groups * rng.choice([200, 700, 5000]), min_size=groups * 8 * share,
      batch_size=groups * rng.choice([7, 32, 96]), gradient_steps=rng.choice([1, 3]),
      eviction='prioritised' if loss == 'dpg' else 'fifo')
  config['loss']['n_step'] = rng.choice([1, 3])
  if loss in ('dqn', 'r2d2', 'dpg'):
    config['loss']['target_every'] = rng.choice([3, 20])
  if loss in ('sac', 'td3'):
    config['loss']['num_critics'] = rng.choice([1, 2, 3])
  if loss == 'td3':
    config['loss']['policy_delay'] = rng.choice([1, 2, 3])
  if loss == 'r2d2':
    config['network'] |= dict(core=rng.choice(['none', 'gru', 'lstm']),
                              core_size=rng.choice([8, 17]))
    config['loss'] |= dict(burn_in=rng.choice([0, 4]), trace_length=rng.choice([5, 16]))
    # The replay has sequences.
    config['replay'] |= dict(capacity=groups * rng.choice([100, 300]), min_size=groups * 2 * share,
                             batch_size=groups * rng.choice([3, 8]))


def smaller(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields simpler experiments; each lacks one part or has one smaller size."""
  def with_(section: str | None, **fields: Any) -> dict[str, Any]:
    simpler = copy.deepcopy(config)
    (simpler[section] if section else simpler).update(fields)
    return simpler

  for name, on in config['normalise'].items():
    if on:
      yield with_('normalise', **{name: False})
  if config['network'].get('core', 'none') != 'none':
    yield with_('network', core='none')
  if config['network'].get('separate_critic'):
    yield with_('network', separate_critic=False)
  if config['optimizer']['kl_target']:
    yield with_('optimizer', kl_target=0.0)
  if config['optimizer']['anneal']:
    yield with_('optimizer', anneal=False)
  for name in ('vtrace', 'clip_value'):
    if config['loss'].get(name):
      yield with_('loss', **{name: False})
  if config['loss'].get('burn_in'):
    yield with_('loss', burn_in=0)
  for name in ('num_epochs', 'num_minibatches', 'num_shards', 'num_grad_shards'):
    if config[name] > 1:
      yield with_(None, **{name: 1})
  if config['microbatch_rows']:
    yield with_(None, microbatch_rows=0)
  if config['unroll_length'] > 2:
    yield with_(None, unroll_length=config['unroll_length'] // 2)
  groups = math.lcm(config['num_shards'], config['num_grad_shards'])
  if config['env']['num_envs'] > groups:
    yield with_('env', num_envs=groups)


def draw_ways(config: dict[str, Any], number: int) -> list[agreement.Variant]:
  """Returns up to three variants of experiment `number` that must agree."""
  rng = random.Random(f'ways of {number}')
  first, *later = agreement.variants(config, rng.choice([0, 0, 1]))
  return [first, *rng.sample(later, min(2, len(later)))]


def disagreement(config: dict[str, Any], number: int, updates: int) -> str:
  """Returns the first difference between the variants of an experiment; '' if there is none."""
  ways = draw_ways(config, number)
  for way, words in agreement.disagreements(config, ways, updates):
    if words:
      return f'{ways[0]} and {way} {words}'
  return ''


def shrink(config: dict[str, Any], number: int, words: str, updates: int
           ) -> tuple[dict[str, Any], str]:
  """Simplifies an experiment as long as its variants differ.

  Args:
    config: the experiment, whose variants differ.
    number: the number of the experiment; it determines the variants.
    words: the difference.
    updates: the updates of each run.

  Returns:
    The smallest experiment and its difference.
  """
  for simpler in smaller(config):
    try:
      difference = disagreement(simpler, number, updates)
    except ValueError:
      continue  # the simpler experiment is invalid
    if difference:
      return shrink(simpler, number, difference, updates)
  return config, words


def describe(config: dict[str, Any]) -> str:
  """Returns a short description of an experiment."""
  network = config['network']
  on = [name for name, value in config['normalise'].items() if value]
  return ' '.join([
      config['loss']['name'], network['name'], network.get('core', 'none'),
      config['optimizer']['name'], config['env']['task'],
      f'{config["env"]["num_envs"]}x{config["unroll_length"]}',
      f'{config["num_grad_shards"]} groups', '+'.join(on)]).strip()


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--first', type=int, default=1, help='number of the first experiment')
  parser.add_argument('--count', type=int, default=100, help='number of experiments')
  parser.add_argument('--updates', type=int, default=60, help='updates of each run')
  parser.add_argument('--isa', choices=['SSE4_2', 'AVX', 'AVX2', 'AVX512'],
                      help='the newest CPU instructions that XLA may use')
  parser.add_argument('--xla_threads', type=int, default=16, help="size of XLA's thread pool")
  args = parser.parse_args()
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  os.environ['NPROC'] = str(args.xla_threads)
  if args.isa:
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_cpu_max_isa={args.isa}'
  jax.config.update('jax_num_cpu_devices', agreement.DEVICES)
  different = 0
  for number in range(args.first, args.first + args.count):
    config = draw(number)
    start = time.monotonic()
    words = disagreement(config, number, args.updates)
    ways = ' '.join(map(str, draw_ways(config, number)))
    print(f'{"DIFFERENT" if words else "identical"} {number:5}  {describe(config)}: {ways} '
          f'({time.monotonic() - start:.0f} s) {words}', flush=True)
    if words:
      different += 1
      smallest, words = shrink(config, number, words, args.updates)
      print(f'  smallest: {words}\n  {smallest}', flush=True)
    jax.clear_caches()  # otherwise the programs of all experiments would stay in memory
  print(f'{args.count - different} of {args.count} experiments are identical everywhere, '
        f'{args.updates} updates each')
  return 1 if different else 0


if __name__ == '__main__':
  sys.exit(main())
