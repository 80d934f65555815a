"""Devices, meshes, and transfers between devices, which never change the values of results."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer_jit.options import Count, defaults, internal, option, shown, uneven

# Arrays of fewer bytes may travel together, see `put`.
_JOIN_BELOW = 2**16
# Most devices of a process.
MAX_DEVICES = 1024
_DEVICES = f'must be a tuple of device indices below {MAX_DEVICES}, such as (0, 1)'


class Placement(NamedTuple):
  """Devices of actors and learners."""

  actors: tuple[jax.Device, ...]  # the device of each of this process's actors
  mesh: Mesh  # the learner's mesh, over all processes
  workers: tuple[jax.Device, ...]  # the device of each gradient worker; may repeat
  env_threads: int  # threads of each environment pool
  # Of each pool of this process the core of its first thread; the others follow it. (): the kernel
  # chooses.
  env_cores: tuple[int, ...] = ()
  process: int = 0  # index of this process
  processes: int = 1  # number of processes

  @property
  def learners(self) -> tuple[jax.Device, ...]:
    """Devices of the learner mesh that belong to this process."""
    return tuple(d for _, d in _local(self.mesh))


def _local(mesh: Mesh) -> list[tuple[int, jax.Device]]:
  """Returns this process's devices of the mesh, with their indices in it."""
  process = jax.process_index()
  return [(i, d) for i, d in enumerate(mesh.devices.flat) if d.process_index == process]


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
  """Options of the placement.

  With a deterministic scheme, only `actor_platform` changes the bits of a result, and off CPUs the
  number of learner devices.
  """

  auto: bool = option(
      True, 'choose for this machine what is left open, () or 0; False: one device, one actor')
  adapt: bool = option(
      True, 'a run that has more than 15 minutes left tries other devices while it trains, and '
      'keeps the fastest')
  actor_devices: tuple = option((), 'indices of the devices that act; (): chosen', at_least=0,
                                at_most=MAX_DEVICES - 1, message=_DEVICES)
  learner_devices: tuple = option((), 'indices of the devices that learn; (): chosen', at_least=0,
                                  at_most=MAX_DEVICES - 1, message=_DEVICES)
  actors_per_device: int = option(0, 'actors, each a thread, on each actor device; 0: chosen',
                                 at_least=0, at_most=1024)
  env_threads: int = option(
      0, 'threads of an environment pool; 0: chosen', at_least=0, at_most=1024)
  pin_envs: bool = option(
      False, "each thread of EnvPool's pools stays on a core of its own (their thread affinity)")
  actor_platform: str = option('auto', 'kind of the actor devices',
                               choices=('auto', 'gpu', 'cpu'))
  updates_per_call: int = option(
      0, 'with a scheme of one program: updates of a call, after which a signal ends the run; 0: '
      'chosen', at_least=0, at_most=1_000_000)
  xla_threads: int = option(
      0, "threads of XLA's CPU pool, at least 2 and one for each device; 0: chosen", at_least=0,
      at_most=4096)
  cluster: str = option(
      'none', "'ray': actors are processes on a Ray cluster, that of RAY_ADDRESS or one begun on "
      'this machine', choices=('none', 'ray'))
  actor_cpus: float = option(1.0, 'on a cluster: CPUs that each process reserves', at_least=0,
                             at_most=4096)
  actor_gpus: float = option(0.0, 'on a cluster: GPUs that each process reserves', at_least=0,
                             at_most=64)
  actor_lives: int = option(
      3, 'on a cluster: processes of an actor that may die in a row, without a result, before the '
      'run fails', at_least=1, at_most=1_000_000)
  store_gb: float = option(
      0.0, 'on a cluster begun on this machine: memory for arrays under way; 0: as computed',
      at_least=0, at_most=1e6)

  learner_delay_s: float = option(
      0.0, 'seconds that the learner waits before each update, to see what a slow one changes '
      "(Cleanba's figure 2)", at_least=0, at_most=60)

  chosen: tuple[str, ...] = internal(())  # fields that a rule has set, not a user

  @property
  def open_fields(self) -> tuple[str, ...]:
    """Names of the fields that are left open."""
    return tuple(name for name in ('actor_devices', 'learner_devices', 'actors_per_device',
                                   'env_threads', 'updates_per_call', 'xla_threads')
                 if not getattr(self, name))

  def differs(self, name: str) -> bool:
    """Returns whether a user must have set a field."""
    return name not in self.chosen and getattr(self, name) != defaults(type(self))[name]

  def actor_count(self, processes: int = 1) -> Count:
    """Returns the number of actors in all processes, named after the field that a user set."""
    name = 'actors_per_device' if self.differs('actors_per_device') else 'actor_devices'
    where = (f'actor_devices = {shown(self.actor_devices)}, actors_per_device = '
             f'{self.actors_per_device}')
    return Count(f'placement.{name}', self.num_actors * processes, self.differs(name), 'actor',
                 where + _in_each(processes))

  def learner_count(self, number: int, processes: int = 1) -> Count:
    """Returns the number of learner devices for error messages.

    Args:
      number: learner devices in all processes.
      processes: number of processes.
    """
    where = f'learner_devices = {shown(self.learner_devices)}{_in_each(processes)}'
    return Count('placement.learner_devices', number, self.differs('learner_devices'),
                 'learner device', where)

  @property
  def is_remote(self) -> bool:
    """True if actors are processes of a cluster."""
    return self.cluster != 'none'

  @property
  def num_actors(self) -> int:
    """Number of actors in a process."""
    return len(self.actor_devices) * self.actors_per_device

  @property
  def num_devices(self) -> int:
    """Number of devices that a process must have."""
    return 1 + max((*self.actor_devices, *self.learner_devices), default=0)


def _in_each(processes: int) -> str:
  return f', in each of {processes} processes' if processes > 1 else ''


def any_process(flags: Sequence[bool], mesh: Mesh) -> list[bool]:
  """Returns whether each flag is set in any process.

  This is a collective: all processes must call it in the same order, each from one thread.

  Args:
    flags: the flags of this process.
    mesh: the mesh of the learner, over all processes.
  """
  if jax.process_count() == 1:
    return list(flags)
  sharding = NamedSharding(mesh, PartitionSpec('learner'))
  row = np.array([flags], np.int32)
  local_rows = [jax.device_put(row, d) for _, d in _local(mesh)]
  rows = jax.make_array_from_single_device_arrays((mesh.size, len(flags)), sharding, local_rows)
  return np.asarray(_sum(rows), bool).tolist()


@jax.jit
def _sum(rows):
  return jnp.sum(rows, axis=0)


def resolve(options: PlacementOptions, num_shards: int, any_platform: bool = False) -> Placement:
  """Returns the placement that the options describe.

  Args:
    options: with device indices that count the devices of each process from 0.
    num_shards: vector environments in all processes.
    any_platform: actors can be on any kind of device; otherwise on CPUs and GPUs only, since
      simulators outside of the program have no calls for others.

  Raises:
    ValueError: a device does not exist, or the actors cannot share the shards evenly.
  """
  platform = options.actor_platform
  if platform == 'auto':
    platform = jax.default_backend()
    if not any_platform and platform not in ('cpu', 'gpu'):
      platform = 'cpu'
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
  if num_shards % (len(actors) * processes):  # if a program joined JAX's processes by itself
    # The default is one shard, so more than one must have been set by a user.
    raise ValueError(uneven(Count('num_shards', num_shards, num_shards > 1, 'shard'),
                            options.actor_count(processes)))

  # Without a rule the pools of this process, one for each shard, share the visible cores.
  local_shards = num_shards // processes
  threads = options.env_threads or max(1, len(os.sched_getaffinity(0)) // local_shards)
  # A mesh has each device once, even if several workers compute gradients on it.
  mesh = mesh_of(list(dict.fromkeys(learners)))
  cores = first_cores(local_shards, threads) if options.pin_envs else ()
  return Placement(tuple(actors), mesh, tuple(learners), threads, cores, jax.process_index(),
                   processes)


def first_cores(pools: int, threads: int) -> tuple[int, ...]:
  """Returns the core of the first thread of each pool, so that each thread has one of its own.

  The threads of a pool are on consecutive cores, as EnvPool counts them, of those that the process
  may use. So a process that `numactl` or a cluster gives the cores of a NUMA node stays there.

  Args:
    pools: environment pools of the process.
    threads: of each pool.

  Raises:
    ValueError: there are not as many cores, or they are not consecutive.
  """
  allowed = sorted(os.sched_getaffinity(0))
  firsts: list[int] = []
  left = allowed
  while len(left) >= threads and len(firsts) < pools:
    is_consecutive = left[threads - 1] == left[0] + threads - 1
    firsts += left[:1] * is_consecutive
    left = left[threads if is_consecutive else 1:]
  if len(firsts) < pools:
    raise ValueError(
        f'placement.pin_envs: {pools} pools (num_shards) of {threads} threads '
        f'(placement.env_threads) need {threads} consecutive cores each, and this process may use '
        f'{len(allowed)}, {shown(allowed)}; take fewer, or False')
  return tuple(firsts)


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
  """Returns a learner mesh of these devices, with one axis."""
  return Mesh(np.array(devices), ('learner',))


def _pick(field: str, indices: Sequence[int], devices: Sequence[jax.Device]) -> list[jax.Device]:
  """Returns the devices with these indices; raises ValueError if one does not exist."""
  for index in indices:
    if not 0 <= index < len(devices):
      raise ValueError(f'placement.{field}: there is no device {index}; this machine has '
                       f'{len(devices)} ({devices[0].platform} 0 to {len(devices) - 1})')
  return [devices[index] for index in indices]


def put_params(params: Any, device: jax.Device) -> Any:
  """Returns a copy of the learner's parameters on an actor's device.

  It is always a copy, because the learner donates its own arrays to the next update.

  Args:
    params: arrays replicated on the learner mesh.
    device: the device of the actor.
  """
  local = replica(params, device)
  return _copy(local) if _is_on(local, device) else put(local, device)


def put(tree: Any, where: jax.Device | NamedSharding) -> Any:
  """Returns the tree on a device, or on a mesh; copies nothing if it is there.

  Between CPU devices small arrays of JAX travel together, because a transfer takes as long as a
  small program. Other devices would run that program only after the one that they run now.

  Args:
    tree: arrays of one device, or of NumPy.
    where: a device of this process, or all devices of a mesh, each of which gets all arrays.
  """
  if _is_on(tree, where):
    return tree
  device = where if isinstance(where, jax.Device) else where.mesh.devices.flat[0]
  leaves, structure = jax.tree.flatten(tree)
  small = {i: x for i, x in enumerate(leaves)
           if isinstance(x, jax.Array) and x.size * x.dtype.itemsize < _JOIN_BELOW}
  if not small or device.platform != 'cpu':
    return jax.device_put(tree, where)
  large = {i: x for i, x in enumerate(leaves) if i not in small}
  joined, moved = jax.device_put((_join(list(small.values())), large), where)
  shapes = tuple((x.shape, x.dtype) for x in small.values())
  moved.update(zip(small, _split(joined, shapes), strict=True))
  return jax.tree.unflatten(structure, [moved[i] for i in range(len(leaves))])


@jax.jit
def _join(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns an array of the elements of all arrays of a type, for each type in order."""
  types = dict.fromkeys(x.dtype for x in arrays)
  return [jnp.concatenate([x.reshape(-1) for x in arrays if x.dtype == dtype]) for dtype in types]


@functools.partial(jax.jit, static_argnums=1)
def _split(joined: Sequence[jax.Array], shapes: tuple[tuple[tuple[int, ...], Any], ...]
           ) -> list[jax.Array]:
  """Returns the arrays of these shapes and types that `_join` joined."""
  rest = {x.dtype: x for x in joined}
  arrays = []
  for shape, dtype in shapes:
    size = math.prod(shape)
    arrays.append(rest[dtype][:size].reshape(shape))
    rest[dtype] = rest[dtype][size:]
  return arrays


def replica(tree: Any, device: jax.Device) -> Any:
  """Returns one copy of each replicated array: that on a device, or any if there is none on it."""
  def leaf(x: jax.Array) -> jax.Array:
    if len(x.sharding.device_set) == 1:
      return x
    return next((shard.data for shard in x.addressable_shards if shard.device == device),
                x.addressable_data(0))
  return jax.tree.map(leaf, tree)


def with_replica(tree: Any, own: Any, device: jax.Device) -> Any:
  """Returns replicated arrays with their replicas on a device replaced.

  Args:
    tree: replicated arrays.
    own: arrays of the same shapes on the device.
    device: one of their devices, of this process.
  """
  def leaf(x: jax.Array, own: jax.Array) -> jax.Array:
    replicas = [own if shard.device == device else shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, replicas)
  return jax.tree.map(leaf, tree, own)


def _is_on(tree: Any, where: jax.Device | NamedSharding) -> bool:
  """Returns whether the arrays of a tree are there; it looks at the first array only.

  This is faster than a `device_put` that has nothing to move.
  """
  leaf = jax.tree.leaves(tree)[0]
  if not isinstance(leaf, jax.Array):
    return False
  if isinstance(where, jax.Device):
    return leaf.devices() == {where}
  return leaf.sharding.is_equivalent_to(where, leaf.ndim)


@jax.jit
def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)


def replicate(tree: Any, mesh: Mesh) -> Any:
  """Copies a tree to every device of a mesh; the copies may be donated.

  Args:
    tree: arrays with the same values in all processes.
    mesh: over all processes.
  """
  sharding = NamedSharding(mesh, PartitionSpec())

  # If an array has several copies, `device_put` would use one of them without copying it.
  one = jax.tree.map(lambda x: x.addressable_data(0), tree)
  copies = [jax.device_put(one, device, may_alias=False) for _, device in _local(mesh)]
  return jax.tree.map(
      lambda *x: jax.make_array_from_single_device_arrays(x[0].shape, sharding, list(x)), *copies)


def everywhere(tree: Any, mesh: Mesh) -> Any:
  """Returns the tree, of one device or of NumPy, on every device of the mesh; see `put`."""
  return put(tree, NamedSharding(mesh, PartitionSpec()))


class Slices(NamedTuple):
  """Neighbouring environments of a batch, cut at the borders between the learner's devices."""

  # For each learner device of this process: the trees of [T, b, ...] arrays on it.
  parts: tuple[Sequence[Any], ...]


def scatter(trees: Sequence[Any], first_env: int, num_envs: int, mesh: Mesh) -> Slices:
  """Sends neighbouring environments of a batch to the learner devices that own them.

  Device d of n owns environments [d, d + 1) * num_envs / n. So each array goes directly to the
  device that uses it, for any number of actors and learners, and never to another process.

  Args:
    trees: trees of arrays [T, B_i, ...], side by side in the batch.
    first_env: index of their first environment in the batch.
    num_envs: environments of the batch.
    mesh: the mesh of the learner.

  Returns:
    The slices on this process's devices of the mesh.
  """
  share = num_envs // mesh.size
  local = _local(mesh)
  parts = [[] for _ in local]
  for tree in trees:
    first = jax.tree.leaves(tree)[0]
    width = first.shape[1]
    # One program cuts what is on a device; NumPy's slices copy nothing.
    envs_of = _envs_on_device if isinstance(first, jax.Array) else _envs
    for part, (d, device) in zip(parts, local, strict=True):
      # Environments that the tree and the device have in common.
      low = max(first_env, d * share)
      high = min(first_env + width, (d + 1) * share)
      if low < high:
        cut = tree
        if high - low < width:
          cut = envs_of(tree, low - first_env, high - first_env)
        part.append(put(cut, device))
    first_env += width
  return Slices(tuple(tuple(p) for p in parts))


def _envs(tree: Any, low: int, high: int) -> Any:
  return jax.tree.map(lambda x: x[:, low:high], tree)


_envs_on_device = jax.jit(_envs, static_argnums=(1, 2))


def by_env(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch [T, B, ...] on a learner mesh: along the second axis."""
  return NamedSharding(mesh, PartitionSpec(None, 'learner'))


def batch_shapes(tree: Any, num_envs: int, mesh: Mesh) -> Any:
  """Returns the shapes and shardings of what `gather` returns.

  Args:
    tree: arrays or shapes [T, B, ...] of some of the environments.
    num_envs: environments of the batch.
    mesh: the mesh of the learner.
  """
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], num_envs, *x.shape[2:]), x.dtype, sharding=by_env(mesh)), tree)


def gather(slices: Sequence[Slices], mesh: Mesh) -> Any:
  """Joins slices to the whole batch.

  Args:
    slices: results of `scatter`, in the order of their environments.
    mesh: the mesh of the learner.

  Returns:
    A tree of global arrays [T, num_envs, ...], sharded over environments.
  """
  local = [_side_by_side([tree for s in slices for tree in s.parts[i]])
           for i in range(len(_local(mesh)))]
  sharding = by_env(mesh)

  def whole(*shards):
    # One device may have the whole batch, in the sharding that its actor gave it.
    if shards[0].sharding == sharding:
      return shards[0]
    shape = (shards[0].shape[0], shards[0].shape[1] * mesh.size, *shards[0].shape[2:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

  return jax.tree.map(whole, *local)


def _side_by_side(trees: Sequence[Any]) -> Any:
  """Returns trees of [T, B_i, ...] concatenated along the second axis."""
  return trees[0] if len(trees) == 1 else _concatenate(tuple(trees))


@functools.partial(jax.jit)
def _concatenate(trees):
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *trees)
