"""A sum tree: draws in proportion to what its leaves hold, in O(log N), on the device.

A node is the sum of its 16 children, added anew from them whenever one changes: never the old sum
plus a difference. So after any number of changes the tree is, bit for bit, the one that would be
built from its leaves at once; it does not drift.

Arrays have a leading axis of groups, each a tree of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics.islands import island

Tree = tuple[jax.Array, ...]  # [groups, nodes] f32 a level, leaves first, the root last
FANOUT = 16
SMALL = 3  # levels of a tree in which float32 tells all leaves apart: 4,096 of them
NOWHERE = 2**31 - 1  # a leaf of no tree, nor its parents nodes: what is put there is dropped


def init(groups: int, leaves: int) -> Tree:
  """Trees of at least `leaves` zeros."""
  sizes = [leaves]
  while sizes[-1] > 1:
    sizes.append(-(-sizes[-1] // FANOUT))
  return tuple(jnp.zeros((groups, -(-size // FANOUT) * FANOUT if size > 1 else 1))
               for size in sizes)


def total(tree: Tree) -> jax.Array:
  """[groups], the sum of the leaves."""
  return tree[-1][:, 0]


def get(tree: Tree, group: jax.Array, leaf: jax.Array) -> jax.Array:
  """The values of leaves [k, m] of groups [k]; 0 where there is no such group."""
  return tree[0].at[group[:, None], leaf].get(mode='fill', fill_value=0.0)


def put(tree: Tree, group: jax.Array, leaf: jax.Array, value: jax.Array) -> Tree:
  """Sets leaves [k, m] of groups [k]; what names no group or leaf there is does nothing.

  A leaf must not be named twice, since on some devices it would not be known which value counts.
  """
  group = group[:, None]
  levels = [tree[0].at[group, leaf].set(value, mode='drop')]
  for above in tree[1:]:
    leaf = leaf // FANOUT
    children = leaf[..., None] * FANOUT + jnp.arange(FANOUT)
    nodes = levels[-1].at[group[..., None], children].get(mode='fill', fill_value=0.0)
    while nodes.shape[-1] > 1:
      nodes = nodes[..., ::2] + nodes[..., 1::2]
    levels.append(above.at[group, leaf].set(nodes[..., 0], mode='drop'))
  return tuple(levels)


def find(tree: Tree, mass: jax.Array, node: jax.Array | int = 0) -> jax.Array:
  """The leaves [groups, m] that hold `mass` [groups, m] of the sum of all that come before.

  Below `node` [groups, m] of the last level, where they are not asked from the root on.
  A leaf of zero is never found where the sum is above zero, whatever was rounded on the way.
  """
  groups, place = jnp.arange(len(mass))[:, None, None], jnp.arange(FANOUT)
  node = jnp.broadcast_to(jnp.int32(node), mass.shape)
  for level in tree[-2::-1]:
    children = level[groups, node[..., None] * FANOUT + place]
    before = _shifted(children, 1)
    for by in (1, 2, 4, 8):
      before = before + _shifted(before, by)
    # The last that holds something and begins at or below the mass.
    here = (children > 0) & (before <= mass[..., None])
    chosen = jnp.max(jnp.where(here, place, 0), axis=-1)
    mass = mass - jnp.max(jnp.where(place == chosen[..., None], before, 0.0), axis=-1)
    node = node * FANOUT + chosen
  return node


def _shifted(x: jax.Array, by: int) -> jax.Array:
  """x one or more places to the right along the last axis, after zeros."""
  return jnp.pad(x[..., :-by], [(0, 0)] * (x.ndim - 1) + [(by, 0)])


def draw(tree: Tree, keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Leaves [groups, count], and the probability of each within its group; `keys` [groups].

  Stratified (Schaul et al. 2016, appendix B.2.1): one from each of `count` equal parts of the sum.
  In a large tree a float32 of that size is too coarse to tell small leaves apart: there the parts
  lead to nodes of 4,096 leaves, within which is drawn anew. Leaves are in ascending order.
  """
  def uniform(stream):
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, stream), (count,)))(keys)

  def of_groups(function, *args):
    return lax.map(lambda group: function(*group), args)

  groups, whole = jnp.arange(len(keys)), total(tree)[:, None]
  mass = of_groups(_strata, uniform(0), whole)
  if len(tree) > SMALL + 1:
    node = find(tree[SMALL:], mass)
    inside = of_groups(_share, uniform(1), tree[SMALL][groups[:, None], node])
    leaf = jnp.sort(find(tree[:SMALL + 1], inside, node), axis=1)
  else:
    leaf = find(tree, mass)
  return leaf, of_groups(_probability, get(tree, groups, leaf), whole)


@island('strata')
def _strata(uniform: jax.Array, whole: jax.Array) -> jax.Array:
  """A place [count] in each of `count` equal parts of the sum `whole` [1]."""
  count = len(uniform)
  return (jnp.arange(count) + uniform) * (1.0 / count) * whole


@island('share_of_node')
def _share(uniform: jax.Array, node: jax.Array) -> jax.Array:
  return uniform * node


@island('probability')
def _probability(leaf: jax.Array, whole: jax.Array) -> jax.Array:
  return leaf / jnp.maximum(whole, 1e-30)
