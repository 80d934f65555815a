"""Compares `fused` on gymnax's CartPole with a program of PureJaxRL's shape, in turn.

.venv/bin/python -m benchmarks.anakin [--num_envs=4] [--pairs=7] [--updates=100]

The other program is PPO in the style of PureJaxRL (https://github.com/luchris429/purejaxrl): one
`lax.scan` over updates contains a scan over steps, and scans over epochs and minibatches.
Environments reset themselves in their step. Actor and critic are two networks of two layers of 64
units. The program was written for this comparison and keeps no receipts. Both programs make the
same number of updates of the same size in a call. The script prints steps a second and their ratio:
the median of the pairs, the lowest and the highest.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from podracer_jit import experiment
from podracer_jit.experiment import build
from podracer_jit.experiment.resolve import resolve

STEPS = 128
EPOCHS = 4
MINIBATCHES = 4
DISCOUNT = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
VALUE_COEF = 0.5
ENTROPY_COEF = 0.01


class Transition(NamedTuple):
  """A step of all environments, each [N, ...]."""

  done: jax.Array
  action: jax.Array
  value: jax.Array
  reward: jax.Array
  log_prob: jax.Array
  obs: jax.Array


class Network(nn.Module):
  """Actor and critic, each with two hidden layers of 64 units."""

  @nn.compact
  def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits [N, 2] and values [N]."""
    outputs = []
    for size, scale in ((2, 0.01), (1, 1.0)):
      x = obs
      for _ in range(2):
        x = nn.tanh(nn.Dense(64, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
      outputs.append(nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x))
    return outputs[0], outputs[1][:, 0]


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
  """Returns log pi(action) [N]."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def scanned_program(num_envs: int, updates: int) -> tuple[Callable, Any]:
  """Returns train(state) -> (state, mean rewards), jitted, and its first state."""
  env, env_params = gymnax.make('CartPole-v1')
  network = Network()
  optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))

  def env_step(carry, _):
    params, opt_state, env_state, obs, key = carry
    key, act_key, step_key = jax.random.split(key, 3)
    logits, value = network.apply(params, obs)
    action = jax.random.categorical(act_key, logits)
    next_obs, env_state, reward, terminated, truncated, _ = jax.vmap(
        env.step, in_axes=(0, 0, 0, None))(
            jax.random.split(step_key, num_envs), env_state, action, env_params)
    row = Transition(terminated | truncated, action, value, reward, log_prob_of(logits, action),
                     obs)
    return (params, opt_state, env_state, next_obs, key), row

  def advantages(rows: Transition, last_value: jax.Array) -> jax.Array:
    def step(carry, row):
      gae, next_value = carry
      goes_on = 1.0 - row.done
      delta = row.reward + DISCOUNT * next_value * goes_on - row.value
      gae = delta + DISCOUNT * GAE_LAMBDA * goes_on * gae
      return (gae, row.value), gae

    start = jnp.zeros_like(last_value), last_value
    return lax.scan(step, start, rows, reverse=True, unroll=16)[1]

  def loss(params, rows: Transition, gae: jax.Array, target: jax.Array) -> jax.Array:
    """Returns PPO's loss of a minibatch.

    Args:
      params: parameters of the network.
      rows: [n, ...] each.
      gae: [n], advantages.
      target: [n], value targets.
    """
    logits, value = network.apply(params, rows.obs)
    ratio = jnp.exp(log_prob_of(logits, rows.action) - rows.log_prob)
    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gae).mean()
    clipped = rows.value + jnp.clip(value - rows.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1).mean()
    return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy

  def minibatch_step(carry, minibatch):
    params, opt_state = carry
    grads = jax.grad(loss)(params, *minibatch)
    change, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, change), opt_state), None

  def epoch(batch, carry, key):
    order = jax.random.permutation(key, num_envs * STEPS)
    shuffled = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(MINIBATCHES, -1, *x.shape[2:]), batch)
    return lax.scan(minibatch_step, carry, shuffled)[0], None

  def update(carry, _):
    carry, rows = lax.scan(env_step, carry, None, STEPS)
    params, opt_state, env_state, obs, key = carry
    gae = advantages(rows, network.apply(params, obs)[1])
    key, order_key = jax.random.split(key)
    batch = rows, gae, gae + rows.value
    (params, opt_state), _ = lax.scan(
        functools.partial(epoch, batch), (params, opt_state), jax.random.split(order_key, EPOCHS))
    return (params, opt_state, env_state, obs, key), rows.reward.mean()

  key = jax.random.key(0)
  obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(
      jax.random.split(key, num_envs), env_params)
  params = network.init(key, obs)
  state = params, optimizer.init(params), env_state, obs, key
  return jax.jit(lambda state: lax.scan(update, state, None, updates)), state


def our_experiment(num_envs: int, updates: int) -> Any:
  """Returns the same experiment for this package; a call makes `updates` updates."""
  config = experiment.config('ppo', 'mlp', 'adam', scheme='fused', unroll_length=STEPS,
                             num_epochs=EPOCHS, num_minibatches=MINIBATCHES)
  config.env.task = 'gymnax:CartPole-v1'
  config.env.num_envs = num_envs
  config.network.separate_critic = True
  config.loss.entropy_coef = ENTROPY_COEF
  config.loss.value_coef = VALUE_COEF
  config.optimizer.learning_rate = 2.5e-4
  config.optimizer.anneal = False
  config.total_steps = 2**30
  config.env.renew_every_updates = 0
  config.placement.updates_per_call = updates
  config.placement.xla_threads = 2
  return resolve(config)


def main() -> None:
  """Runs the script."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--num_envs', type=int, default=4)
  parser.add_argument('--pairs', type=int, default=7)
  parser.add_argument('--updates', type=int, default=100, help='updates of a call')
  args = parser.parse_args()
  run = build.make_run(our_experiment(args.num_envs, args.updates))
  train, state = scanned_program(args.num_envs, args.updates)
  steps = args.num_envs * STEPS * args.updates

  def fire_scanned() -> float:
    nonlocal state
    start = time.perf_counter()
    state, rewards = jax.block_until_ready(train(state))
    del rewards
    return steps / (time.perf_counter() - start)

  reports: list[Any] = []
  with build.segment(run, build.Snapshot(run.initial_state()), 10**6, reports.append) as segment:
    worker = next(worker for worker in segment.workers if worker.name == 'learner')
    ours = worker.state

    def fire_ours() -> float:
      nonlocal ours
      start = time.perf_counter()
      ours, outputs = worker.fire(ours)
      jax.block_until_ready(outputs)
      return steps / (time.perf_counter() - start)

    # The first call of each compiles or warms up.
    pairs = [(fire_scanned(), fire_ours()) for _ in range(args.pairs + 1)][1:]
  ratios = sorted(ours / scanned for scanned, ours in pairs)
  print(f'{args.num_envs} environments x {STEPS} steps: scanned '
        f'{statistics.median(scanned for scanned, _ in pairs):,.0f} steps/s, fused '
        f'{statistics.median(ours for _, ours in pairs):,.0f}; ratio '
        f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})')


if __name__ == '__main__':
  main()
