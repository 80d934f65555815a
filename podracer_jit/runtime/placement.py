"""Where things run: devices, meshes, and the moves between them. It never changes a result."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit.options import Count, defaults, option, shown, uneven

MAX_DEVICES = 1024  # of a process
_DEVICES = f'must be a tuple of device indices below {MAX_DEVICES}, such as (0, 1)'


class Placement(NamedTuple):
  """Devices of this process's actors, one each, and the learner's mesh over all processes."""

  actors: tuple[jax.Device, ...]
  mesh: Mesh
  workers: tuple[jax.Device, ...]  # of those that make gradients; a device may have several
  env_threads: int  # EnvPool threads of each pool
  process: int = 0
  processes: int = 1

  @property
  def learners(self) -> tuple[jax.Device, ...]:
    """The devices of the learner mesh that belong to this process."""
    return tuple(d for _, d in _local(self.mesh))


def _local(mesh: Mesh) -> list[tuple[int, jax.Device]]:
  """This process's devices of the mesh, with their places in it."""
  here = jax.process_index()
  return [(i, d) for i, d in enumerate(mesh.devices.flat) if d.process_index == here]


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
  """Where things run. Of deterministic schemes only xla_threads and actor_platform change bits."""

  actor_devices: tuple = option((0,), 'indices of the devices that act', at_least=0,
                                at_most=MAX_DEVICES - 1, not_empty=True, words=_DEVICES)
  learner_devices: tuple = option((0,), 'indices of the devices that learn', at_least=0,
                                  at_most=MAX_DEVICES - 1, not_empty=True, words=_DEVICES)
  actors_per_device: int = option(1, 'actors, each a thread, on each actor device', at_least=1,
                                 at_most=1024)
  env_threads: int = option(
      0, "threads of an environment pool; 0: the visible cores, shared by the pools", at_least=0,
      at_most=1024)
  actor_platform: str = option('auto', 'kind of the actor devices',
                               choices=('auto', 'gpu', 'cpu'))
  updates_per_call: int = option(
      16, 'of a scheme that is one program: updates of a call, between two checks for a stop',
      at_least=1, at_most=1_000_000)
  xla_threads: int = option(
      16, "threads of XLA's CPU pool; they change bits, so they are part of the experiment",
      at_least=1, at_most=4096)

  def differs(self, name: str) -> bool:
    """Whether a field has another value than by default, so that somebody has set it."""
    return getattr(self, name) != defaults(type(self))[name]

  def actor_count(self, processes: int = 1) -> Count:
    """Returns the number of actors of so many processes, by the field that somebody has set."""
    name = 'actors_per_device' if self.differs('actors_per_device') else 'actor_devices'
    where = (f'actor_devices = {shown(self.actor_devices)}, actors_per_device = '
             f'{self.actors_per_device}')
    return Count(f'placement.{name}', self.num_actors * processes, self.differs(name), 'actor',
                 where + _in_each(processes))

  def learner_count(self, number: int, processes: int = 1) -> Count:
    """Returns the number of learner devices, `number` in so many processes."""
    where = f'learner_devices = {shown(self.learner_devices)}{_in_each(processes)}'
    return Count('placement.learner_devices', number, self.differs('learner_devices'),
                 'learner device', where)

  @property
  def num_actors(self) -> int:
    """Actors of a process."""
    return len(self.actor_devices) * self.actors_per_device

  @property
  def num_devices(self) -> int:
    """Devices that a process must have."""
    return 1 + max((*self.actor_devices, *self.learner_devices))


def _in_each(processes: int) -> str:
  return f', in each of {processes} processes' if processes > 1 else ''


def any_process(flag: bool, mesh: Mesh) -> bool:
  """Whether the flag is set in any process; all ask in the same order, from one thread each."""
  if jax.process_count() == 1:
    return flag
  sharding = NamedSharding(mesh, PartitionSpec('learner'))
  here = [jax.device_put(jnp.array([flag], jnp.int32), d) for _, d in _local(mesh)]
  return bool(_sum(jax.make_array_from_single_device_arrays((mesh.size,), sharding, here)))


@jax.jit
def _sum(flags):
  return jnp.sum(flags)


def resolve(options: PlacementOptions, num_shards: int) -> Placement:
  """The placement that `options` ask for; device indices are those of each process.

  Raises:
    ValueError: a device that is not here, or shards that the actors cannot share out evenly.
  """
  platform = options.actor_platform
  if platform == 'auto':  # EnvPool has calls for CPU and GPU alone
    platform = jax.default_backend() if jax.default_backend() in ('cpu', 'gpu') else 'cpu'
  try:
    actor_kind = jax.local_devices(backend=platform)
  except RuntimeError:
    raise ValueError(f'placement.actor_platform: there is no {platform} here, only '
                     f'{jax.default_backend()}') from None
  actors = _pick('actor_devices', options.actor_devices, actor_kind)
  actors = [device for device in actors for _ in range(options.actors_per_device)]
  processes = jax.process_count()
  learners = [device for p in range(processes) for device in _pick(
      'learner_devices', options.learner_devices,
      [d for d in jax.devices() if d.process_index == p])]
  if num_shards % (len(actors) * processes):
    # By default there is one shard.
    raise ValueError(uneven(Count('num_shards', num_shards, num_shards > 1, 'shard'),
                            options.actor_count(processes)))
  here = num_shards // processes
  threads = options.env_threads or max(1, len(os.sched_getaffinity(0)) // here)
  return Placement(tuple(actors), mesh_of(list(dict.fromkeys(learners))), tuple(learners), threads,
                   jax.process_index(), processes)


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
  """A learner mesh."""
  return Mesh(np.array(devices), ('learner',))


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
  return _copy(local) if _is_on(local, device) else jax.device_put(local, device, may_alias=False)


def _is_on(tree: Any, device: jax.Device) -> bool:
  """Whether a tree, of which all is in one place, is there: sooner asked than moved to it."""
  leaf = jax.tree.leaves(tree)[0]
  return isinstance(leaf, jax.Array) and leaf.devices() == {device}


@jax.jit
def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
  """The tree, equal in all processes, on every device of the mesh: copies that may be donated."""
  sharding = NamedSharding(mesh, PartitionSpec())

  def everywhere(x):
    x = x.addressable_data(0)  # one copy: of several device_put would take one as it is
    copies = [jax.device_put(x, device, may_alias=False) for _, device in _local(mesh)]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, copies)

  return jax.tree.map(everywhere, tree)


def everywhere(tree: Any, mesh: Mesh) -> Any:
  """The tree on every device of the mesh; where it is there already it is not copied."""
  return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


class Slices(NamedTuple):
  """Neighbouring environments of a batch, cut where the learner's devices meet."""

  parts: tuple[Sequence[Any], ...]  # for each learner device of this process, what goes to it


def scatter(trees: Sequence[Any], first_env: int, num_envs: int, mesh: Mesh) -> Slices:
  """Sends trees of [T, B, ...] arrays, that lie side by side from `first_env` on, to the mesh.

  Device d of n holds environments [d, d + 1) * num_envs / n, so rows go straight to where they are
  used, whatever the number of actors and learners, and never to another process.
  """
  share, local = num_envs // mesh.size, _local(mesh)
  parts = [[] for _ in local]
  for tree in trees:
    width = jax.tree.leaves(tree)[0].shape[1]
    for part, (d, device) in zip(parts, local, strict=True):
      low, high = max(first_env, d * share), min(first_env + width, (d + 1) * share)
      if low < high:
        cut = tree
        if high - low < width:
          cut = jax.tree.map(lambda x, a=low - first_env, b=high - first_env: x[:, a:b], tree)
        part.append(cut if _is_on(cut, device) else jax.device_put(cut, device))
    first_env += width
  return Slices(tuple(tuple(p) for p in parts))


def by_env(mesh: Mesh) -> NamedSharding:
  """How a learner mesh has its batch: cut along the second axis."""
  return NamedSharding(mesh, PartitionSpec(None, 'learner'))


def gather(slices: Sequence[Slices], mesh: Mesh) -> Any:
  """The whole batch as global arrays [T, num_envs, ...], sharded over environments."""
  local = [_side_by_side([tree for s in slices for tree in s.parts[i]])
           for i in range(len(_local(mesh)))]
  sharding = by_env(mesh)

  def whole(*shards):
    if shards[0].sharding == sharding:  # one device has it all, as its actor made it
      return shards[0]
    shape = (shards[0].shape[0], shards[0].shape[1] * mesh.size, *shards[0].shape[2:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

  return jax.tree.map(whole, *local)


def _side_by_side(trees: Sequence[Any]) -> Any:
  return trees[0] if len(trees) == 1 else _concatenate(tuple(trees))


@functools.partial(jax.jit)
def _concatenate(trees):
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *trees)
