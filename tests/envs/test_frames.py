"""Stacks kept with each frame once, against stacks kept whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from podracer_jit.envs import envpool_envs, frames


def make_stacks(stack, channels, steps, num_envs=6, seed=0):
  """[T + 1, B, stack * channels, 3, 2]: of numbered frames; filled with one now and then.

  The stack of row 0 has had frames before, which are others than row 0's.
  """
  rng, made = np.random.default_rng(seed), []
  for _ in range(num_envs):
    held = [rng.integers(256, size=(channels, 3, 2)) for _ in range(stack)]
    rows = [np.concatenate(held)]
    for _ in range(steps):
      newest = rng.integers(256, size=(channels, 3, 2))
      held = [newest] * stack if rng.random() < 0.3 else [*held[1:], newest]
      rows.append(np.concatenate(held))
    made.append(rows)
  return np.stack(made, axis=1).astype(np.uint8)


SHAPES = [(4, 1, 12), (4, 3, 7), (2, 1, 5), (3, 2, 1), (4, 1, 2)]  # some shorter than a stack


def in_turn(obs, stack):
  """Row by row, as a rollout does it."""
  def turn(t, rows):
    return frames.add(rows, t, obs[jnp.maximum(t - 1, 0)], obs[t])
  return jax.lax.fori_loop(0, len(obs), turn, frames.begin(obs[0], len(obs) - 1, stack))


@pytest.mark.parametrize('make', [in_turn, frames.from_stacks])
@pytest.mark.parametrize('stack, channels, steps', SHAPES)
def test_stacks_are_what_they_were(stack, channels, steps, make):
  obs = jnp.asarray(make_stacks(stack, channels, steps))
  rows = jax.jit(make, static_argnums=1)(obs, stack)
  assert rows.frame.shape == (steps + stack, 6, channels, 3, 2)
  assert rows.is_reset_stack.shape == (steps, 6)
  assert rows.is_reset_stack.any() and not rows.is_reset_stack.all()
  assert_array_equal(jax.jit(frames.stacks)(rows), obs)
  assert_array_equal(jax.jit(frames.last)(rows), obs[-1:])
  step, env = (x.reshape(-1) for x in np.indices((steps + 1, 6)))
  order = np.random.default_rng(1).permutation(len(step))
  assert_array_equal(jax.jit(frames.pick)(rows, step[order], env[order]),
                     obs[step[order], env[order]])


@pytest.mark.quick
def test_what_is_no_stack_is_kept_as_it_is():
  obs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 7)))
  assert frames.from_stacks(obs, 1) is obs is frames.stacks(obs)
  assert_array_equal(in_turn(obs, 1), obs)
  assert_array_equal(frames.last(obs), obs[4:])
  assert_array_equal(frames.pick(obs, jnp.array([4, 1]), jnp.array([0, 2])),
                     obs[jnp.array([4, 1]), jnp.array([0, 2])])


def test_the_frames_of_a_rollout_are_kept_in_a_quarter_of_the_bytes():
  rows = jax.eval_shape(lambda: frames.begin(jnp.zeros((64, 4, 84, 84), jnp.uint8), 20, 4))
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rows)) == 64 * (24 * 7056 + 20)


def test_stacks_are_known_of_atari_alone():
  """ViZDoom's last observation of an episode neither goes on nor is one frame S times."""
  assert envpool_envs.make_spec('Pong-v5', {}).stack == 4
  assert envpool_envs.make_spec('Pong-v5', dict(stack_num=3)).stack == 3
  assert envpool_envs.make_spec('TakeCover-v1', dict(use_combined_action=True)).stack == 1
