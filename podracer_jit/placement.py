"""Where things run: devices, meshes, and the moves between them. It never changes a result."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Placement(NamedTuple):
  """Devices of the actors, one each, and the learner's mesh."""

  actors: tuple[jax.Device, ...]
  mesh: Mesh
  env_threads: int  # EnvPool threads of each pool

  @property
  def learners(self) -> tuple[jax.Device, ...]:
    """The devices of the learner mesh."""
    return tuple(self.mesh.devices.flat)


def prepare_host(options: Mapping[str, Any]) -> None:
  """Sets what JAX reads when its first backend starts; call it before that.

  The size of XLA's CPU thread pool decides how reductions are split, so it belongs to the
  experiment: it must not follow the cores or the virtual devices that happen to be here.

  Raises:
    ValueError: more devices than `placement.xla_threads`.
  """
  devices = 1 + max((*options['actor_devices'], *options['learner_devices']))
  threads = options['xla_threads']
  if devices > threads:
    raise ValueError(f'placement.xla_threads: must be at least the number of devices of a process, '
                     f'{devices} here, got {threads}')
  os.environ['NPROC'] = str(threads)
  jax.config.update('jax_num_cpu_devices', devices)


def resolve(options: Mapping[str, Any], num_shards: int) -> Placement:
  """The placement that `options` ask for, on this machine.

  Raises:
    ValueError: a device that is not here, or shards that the actors cannot share out evenly.
  """
  platform = options['actor_platform']
  if platform == 'auto':  # EnvPool has calls for CPU and GPU alone
    platform = jax.default_backend() if jax.default_backend() in ('cpu', 'gpu') else 'cpu'
  try:
    actor_kind = jax.devices(platform)
  except RuntimeError:
    raise ValueError(f'placement.actor_platform: there is no {platform} here, only '
                     f'{jax.default_backend()}') from None
  actors = _pick('actor_devices', options['actor_devices'], actor_kind)
  learners = _pick('learner_devices', options['learner_devices'], jax.devices())
  actors = [device for device in actors for _ in range(options['actors_per_device'])]
  if num_shards % len(actors):
    raise ValueError(f'num_shards: {num_shards} shards cannot be shared by {len(actors)} actors '
                     '(actor_devices x actors_per_device)')
  threads = options['env_threads'] or max(1, len(os.sched_getaffinity(0)) // num_shards)
  return Placement(tuple(actors), Mesh(np.array(learners), ('learner',)), threads)


def _pick(field: str, indices: Sequence[int], devices: Sequence[jax.Device]) -> list[jax.Device]:
  for index in indices:
    if not 0 <= index < len(devices):
      raise ValueError(f'placement.{field}: there is no device {index}; this machine has '
                       f'{len(devices)} ({devices[0].platform} 0 to {len(devices) - 1})')
  return [devices[index] for index in indices]


def put_params(params: Any, device: jax.Device) -> Any:
  """A copy of parameters that the learner mesh holds, on an actor's device.

  Always a copy: the learner donates its own to the next update.
  """
  local = jax.tree.map(lambda x: x.addressable_data(0), params)
  return jax.device_put(local, device, may_alias=False)


def replicate(tree: Any, mesh: Mesh) -> Any:
  """The tree on every device of the mesh, as copies that may be donated."""
  return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()), may_alias=False)


class Slices(NamedTuple):
  """Neighbouring environments of a batch, cut where the learner's devices meet."""

  parts: tuple[Sequence[Any], ...]  # for each learner device, the trees that go to it


def scatter(trees: Sequence[Any], first_env: int, num_envs: int, mesh: Mesh) -> Slices:
  """Sends trees of [T, B, ...] arrays, that lie side by side from `first_env` on, to the mesh.

  Device d of n holds environments [d, d + 1) * num_envs / n, so rows go straight to where they are
  used, whatever the number of actors and learners.
  """
  share = num_envs // mesh.size
  parts = [[] for _ in mesh.devices.flat]
  for tree in trees:
    width = jax.tree.leaves(tree)[0].shape[1]
    for d, device in enumerate(mesh.devices.flat):
      low, high = max(first_env, d * share), min(first_env + width, (d + 1) * share)
      if low < high:
        cut = tree
        if high - low < width:
          cut = jax.tree.map(lambda x, a=low - first_env, b=high - first_env: x[:, a:b], tree)
        parts[d].append(jax.device_put(cut, device))
    first_env += width
  return Slices(tuple(tuple(p) for p in parts))


def gather(slices: Sequence[Slices], mesh: Mesh) -> Any:
  """The whole batch as global arrays [T, num_envs, ...], sharded over environments."""
  local = [_side_by_side([tree for s in slices for tree in s.parts[d]]) for d in range(mesh.size)]
  sharding = NamedSharding(mesh, PartitionSpec(None, 'learner'))

  def whole(*shards):
    shape = (shards[0].shape[0], shards[0].shape[1] * mesh.size, *shards[0].shape[2:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

  return jax.tree.map(whole, *local)


def _side_by_side(trees: Sequence[Any]) -> Any:
  return trees[0] if len(trees) == 1 else _concatenate(tuple(trees))


@functools.partial(jax.jit)
def _concatenate(trees):
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *trees)
