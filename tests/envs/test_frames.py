"""Frame stacks that store each frame once, compared with whole stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from podracer_jit.envs import envpool_envs, frames


def make_stacks(stack, channels, steps, num_envs=6, seed=0):
  """Returns stacks of random frames, [T + 1, B, stack * channels, 3, 2], with some resets.

  A reset fills the stack with its frame. Row 0 is in the middle of an episode.
  """
  rng = np.random.default_rng(seed)
  columns = []
  for _ in range(num_envs):
    newest_frames = [rng.integers(256, size=(channels, 3, 2)) for _ in range(stack)]
    rows = [np.concatenate(newest_frames)]
    for _ in range(steps):
      frame = rng.integers(256, size=(channels, 3, 2))
      is_reset = rng.random() < 0.3
      newest_frames = [frame] * stack if is_reset else [*newest_frames[1:], frame]
      rows.append(np.concatenate(newest_frames))
    columns.append(rows)
  return np.stack(columns, axis=1).astype(np.uint8)


# stack, channels, steps; the last two rollouts are shorter than a stack
SHAPES = [(4, 1, 12), (4, 3, 7), (2, 1, 5), (3, 2, 1), (4, 1, 2)]


def row_by_row(obs, stack):
  """Stores observations as a rollout does, row by row."""
  def add_row(t, rows):
    return frames.add(rows, t, obs[jnp.maximum(t - 1, 0)], obs[t])
  return jax.lax.fori_loop(0, len(obs), add_row, frames.begin(obs[0], len(obs) - 1, stack))


@pytest.mark.parametrize('store', [row_by_row, frames.from_stacks])
@pytest.mark.parametrize('stack, channels, steps', SHAPES)
def test_restored_stacks_equal_the_original(stack, channels, steps, store):
  obs = jnp.asarray(make_stacks(stack, channels, steps))
  rows = jax.jit(store, static_argnums=1)(obs, stack)
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
def test_observations_without_a_stack_are_not_changed():
  obs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 7)))
  assert frames.from_stacks(obs, 1) is obs is frames.stacks(obs)
  assert_array_equal(row_by_row(obs, 1), obs)
  assert_array_equal(frames.last(obs), obs[4:])
  assert_array_equal(frames.pick(obs, jnp.array([4, 1]), jnp.array([0, 2])),
                     obs[jnp.array([4, 1]), jnp.array([0, 2])])


def test_frames_take_a_quarter_of_the_bytes_of_stacks():
  rows = jax.eval_shape(lambda: frames.begin(jnp.zeros((64, 4, 84, 84), jnp.uint8), 20, 4))
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rows)) == 64 * (24 * 7056 + 20)


def test_only_atari_tasks_have_frame_stacks():
  """ViZDoom ends an episode with a stack that neither shifts nor repeats one frame."""
  assert envpool_envs.make_spec('Pong-v5', {}).stack == 4
  assert envpool_envs.make_spec('Pong-v5', dict(stack_num=3)).stack == 3
  assert envpool_envs.make_spec('TakeCover-v1', dict(use_combined_action=True)).stack == 1
