"""Rows that devices fetch from each other: every byte arrives, on any mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from podracer_jit.numerics import indexing
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.numerics.groups import Groups
from tests.runs import on_mesh

GROUPS, ROWS, WANTED = 8, 5, 48
BY_GROUP = PartitionSpec(AXIS)


def arrays(rng):
  """Returns arrays [GROUPS, ROWS, 3] of random bytes, among them NaNs of any kind and -0.0."""
  shape = GROUPS, ROWS, 3
  kinds = dict(f32=np.float32, bf16=ml_dtypes.bfloat16, u8=np.uint8, i32=np.int32, u16=np.uint16)
  numbers = {}
  for name, kind in kinds.items():
    size = np.dtype(kind).itemsize
    numbers[name] = rng.integers(0, 256, (*shape, size), np.uint8).view(kind)[..., 0]
  flat = numbers['f32'].reshape(-1)
  flat[::3] = -0.0
  flat[1::3] = np.uint32([0x7FC00001]).view(np.float32)  # a NaN with a payload
  flat[2::30] = np.uint32([0xFFA00001]).view(np.float32)  # a signalling one
  # XLA's CPUs read any NaN of bfloat16 as the usual one, on one device, too.
  is_nan = np.isnan(numbers['bf16'].astype(np.float32))
  numbers['bf16'][is_nan] = ml_dtypes.bfloat16(np.nan)
  numbers['bool'] = rng.integers(0, 2, shape).astype(bool)
  return numbers


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('size', [1, 2, 4])
def test_rows_arrive_byte_for_byte(size, axis):
  """Each device asks for rows of its own choice, of its own groups and of others."""
  rng = np.random.default_rng(size)
  stored = arrays(rng)
  number = rng.integers(0, GROUPS, WANTED, np.int32)
  row = rng.integers(0, ROWS, WANTED, np.int32)
  groups = Groups(GROUPS, 1, size)

  def fetch(stored, number, row):
    def read(group, row):
      rows = jax.tree.map(lambda x: indexing.read(x, group, row), stored)
      return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), rows)
    return groups.fetch(read, number, row, axis=axis)

  out = PartitionSpec(*[None] * axis, AXIS)
  fetched = on_mesh(fetch, size, (BY_GROUP, BY_GROUP, BY_GROUP), out)(stored, number, row)
  for name, x in stored.items():
    expected = np.moveaxis(x[number, row], 0, axis)
    assert np.asarray(fetched[name]).tobytes() == np.ascontiguousarray(expected).tobytes(), name
    assert fetched[name].dtype == x.dtype


def test_an_index_of_a_group_on_another_device_is_out_of_range():
  index = on_mesh(lambda: Groups(6, 1, 2).local_index(jnp.arange(6)), 2, (), BY_GROUP)()
  np.testing.assert_array_equal(index, [0, 1, 2, 3, 3, 3, 3, 3, 3, 0, 1, 2])
