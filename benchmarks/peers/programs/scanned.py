"""PPO of PureJaxRL's shape on an environment of gymnax, with sizes and loss of one of our configs.

python -m benchmarks.peers.programs.scanned CONFIG RECORDS [SEEDS]

The shape is PureJaxRL's (https://github.com/luchris429/purejaxrl): one `lax.scan` over updates
contains a scan over steps, and scans over epochs and minibatches. Environments reset themselves in
their step. Actor and critic are two networks. Several seeds are one program under `vmap`. The
program was written for this comparison and keeps no receipts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.peers.programs.records import arguments

ROWS_OF_A_CALL = 2**17  # so that a call is far longer than what Python adds to it


class Transition(NamedTuple):
  """A step of all environments, each [N, ...]."""

  done: jax.Array
  action: jax.Array
  value: jax.Array
  reward: jax.Array
  log_prob: jax.Array
  obs: jax.Array


class Network(nn.Module):
  """Actor and critic, each with its own hidden layers."""

  hidden: Sequence[int]
  actions: int

  @nn.compact
  def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits [N, actions] and values [N]."""
    outputs = []
    for size, scale in ((self.actions, 0.01), (1, 1.0)):
      x = obs.reshape(len(obs), -1)
      for units in self.hidden:
        x = nn.tanh(nn.Dense(units, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
      outputs.append(nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x))
    return outputs[0], outputs[1][:, 0]


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
  """Returns log pi(action) [N]."""
  return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]


def program(config: Mapping[str, Any], updates: int) -> tuple[Callable, Callable]:
  """Builds the training.

  Args:
    config: one of our configs of PPO, as nested dicts; the rate of its optimizer is constant here.
    updates: number of updates in a call.

  Returns:
    first(key) -> state, and train(state) -> (state, mean rewards [updates]); neither is jitted.
  """
  options = config['loss']
  num_envs = config['env']['num_envs']
  num_steps = config['unroll_length']
  env, env_params = gymnax.make(config['env']['task'].removeprefix('gymnax:'))
  network = Network(tuple(config['network']['hidden']), env.action_space(env_params).n)
  optimizer = optax.chain(
      optax.clip_by_global_norm(config['optimizer']['max_grad_norm']),
      optax.adam(config['optimizer']['learning_rate'], eps=config['optimizer']['eps']))

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
      delta = row.reward + options['discount'] * next_value * goes_on - row.value
      gae = delta + options['discount'] * options['gae_lambda'] * goes_on * gae
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
    clip = options['clip']
    logits, value = network.apply(params, rows.obs)
    ratio = jnp.exp(log_prob_of(logits, rows.action) - rows.log_prob)
    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
    policy_loss = -jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - clip, 1 + clip) * gae).mean()
    error = jnp.square(value - target)
    if options['clip_value']:
      clipped = rows.value + jnp.clip(value - rows.value, -clip, clip)
      error = jnp.maximum(error, jnp.square(clipped - target))
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=1).mean()
    return (policy_loss + options['value_coef'] * 0.5 * error.mean()
            - options['entropy_coef'] * entropy)

  def minibatch_step(carry, minibatch):
    params, opt_state = carry
    grads = jax.grad(loss)(params, *minibatch)
    change, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, change), opt_state), None

  def epoch(batch, carry, key):
    order = jax.random.permutation(key, num_envs * num_steps)
    shuffled = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(
            config['num_minibatches'], -1, *x.shape[2:]), batch)
    return lax.scan(minibatch_step, carry, shuffled)[0], None

  def update(carry, _):
    carry, rows = lax.scan(env_step, carry, None, num_steps)
    params, opt_state, env_state, obs, key = carry
    gae = advantages(rows, network.apply(params, obs)[1])
    key, order_key = jax.random.split(key)
    batch = rows, gae, gae + rows.value
    (params, opt_state), _ = lax.scan(functools.partial(epoch, batch), (params, opt_state),
                                      jax.random.split(order_key, config['num_epochs']))
    return (params, opt_state, env_state, obs, key), rows.reward.mean()

  def first(key: jax.Array):
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(
        jax.random.split(key, num_envs), env_params)
    params = network.init(key, obs)
    return params, optimizer.init(params), env_state, obs, key

  return first, lambda state: lax.scan(update, state, None, updates)


def main() -> None:
  """Trains until the process is ended."""
  config, records, seeds = arguments()
  num_seeds = int(seeds[0]) if seeds else 1
  rows = config['env']['num_envs'] * config['unroll_length'] * num_seeds
  updates = max(1, ROWS_OF_A_CALL // rows)
  first, train = program(config, updates)
  key = jax.random.key(0)
  if seeds:
    first, train = jax.vmap(first), jax.vmap(train)
    key = jax.random.split(key, num_seeds)
  state = jax.jit(first)(key)
  train = jax.jit(train)
  steps = 0
  while True:
    state, rewards = jax.block_until_ready(train(state))
    del rewards
    steps += updates * rows
    records.write(steps)


if __name__ == '__main__':
  main()
