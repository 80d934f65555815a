"""Updates on one device: who has the optimizer's state, and copies with all bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer_jit import loops
from podracer_jit.experiment import build
from podracer_jit.learner import sharding
from podracer_jit.runtime import placement
from tests.runs import initial_state, prepared, small
from tests.schemes.test_schemes import with_scheme


def special_values():
  """Returns arrays whose bits arithmetic would change, or whose type it does not have."""
  floats = np.array([-0.0, 0.0, np.nan, -np.inf, 1e-45, np.finfo(np.float32).max], np.float32)
  floats[2:3].view(np.uint32)[:] |= 5  # a NaN with a payload
  large = np.random.default_rng(0).integers(0, 2**32, 5001, np.uint32).view(np.float32)
  return dict(floats=jnp.asarray(floats), large=jnp.asarray(large), flag=jnp.array([True, False]),
              count=jnp.int32(-7), bytes=jnp.uint8([0, 255]), half=jnp.bfloat16([-0.0, 1.5]),
              hash=jnp.uint32([2**32 - 1]), empty=jnp.zeros((0, 3)), key=jax.random.key(3))


def as_bytes(x):
  x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return np.asarray(x).tobytes()


@pytest.mark.parametrize('count', [2, 3, 8])  # of eight devices, each adds a slice
def test_all_devices_get_the_bits_of_the_first(count):
  mesh = placement.mesh_of(jax.devices()[:count])
  values = jax.device_put(special_values(), mesh.devices.flat[0])
  others = placement.everywhere(jax.tree.map(
      lambda x: jax.random.key(9) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else jnp.ones_like(x), values), mesh)
  differing = placement.with_replica(others, values, mesh.devices.flat[0])
  copies = sharding.copies_of_first(mesh)(differing)
  for device in mesh.devices.flat:
    on_device = placement.replica(copies, device)
    for name, x in values.items():
      assert on_device[name].devices() == {device} and on_device[name].dtype == x.dtype
      assert as_bytes(on_device[name]) == as_bytes(x), name


@pytest.mark.parametrize('scheme', ['dppo', 'rapid'])
def test_one_device_has_the_optimizer_and_all_have_the_parameters(scheme):
  run = prepared(with_scheme(scheme, small('ppo', num_shards=2, num_grad_shards=2)))
  centre, other = run.place.mesh.devices.flat
  first = initial_state(run)
  of_other = [shard.data for x in jax.tree.leaves(first.opt_state) for shard in x.addressable_shards
              if shard.device == other]
  updates = []

  def after(position, wait_written):
    updates.append(position.update)
    state = position.state
    assert {device for x in jax.tree.leaves(state.opt_state) for device in x.devices()} == {centre}
    for x in jax.tree.leaves((state.params, state.steps, state.update)):
      a, b = (placement.replica(x, device) for device in (centre, other))
      assert (a.devices(), b.devices()) == ({centre}, {other}) and as_bytes(a) == as_bytes(b)
    return False

  with build.segment(run, build.Snapshot(first), 3, lambda report: None,
                     build.Events(after=after)) as segment:
    loops.run(segment.workers)
  assert updates == [1, 2, 3]
  assert len(of_other) > 4 and all(x.is_deleted() for x in of_other)
