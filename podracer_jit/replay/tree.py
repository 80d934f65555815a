"""Sum tree on the device: draws leaves in proportion to their values in O(log N).

A node is the sum of its 16 children. It is recomputed from them whenever one changes, instead of
adding a difference to the old sum. So after any number of changes the tree is bitwise equal to one
built from its leaves at once; rounding errors do not accumulate.

Arrays have a leading axis of groups; each group has a tree of its own. A replay has one group.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer_jit.numerics import indexing
from podracer_jit.numerics.islands import island

# One array [groups, nodes] f32 for each level, the leaves first and the root last.
Tree = tuple[jax.Array, ...]
FANOUT = 16
# Levels below a node of 4,096 leaves. A float32 sum of so many leaves is fine enough to tell all of
# them apart.
BLOCK_LEVELS = 3
# Index of a leaf that no tree has, nor its parents in their levels: values put there are dropped.
NOWHERE = 2**31 - 1


def init(groups: int, leaves: int) -> Tree:
  """Returns trees of at least `leaves` leaves, all zero."""
  sizes = [leaves]
  while sizes[-1] > 1:
    sizes.append(-(-sizes[-1] // FANOUT))
  return tuple(jnp.zeros((groups, -(-size // FANOUT) * FANOUT if size > 1 else 1))
               for size in sizes)


def total(tree: Tree) -> jax.Array:
  """Returns the sum of each group's leaves, [groups] f32."""
  return tree[-1][:, 0]


def get(tree: Tree, group: jax.Array, leaf: jax.Array) -> jax.Array:
  """Returns the values [k, m] of leaves [k, m] of groups [k]; 0 for out-of-range groups."""
  chex.assert_rank([group, leaf], [1, 2])
  chex.assert_equal_shape_prefix([group, leaf], 1)
  return indexing.read_or(0.0, tree[0], group[:, None], leaf)


def put(tree: Tree, group: jax.Array, leaf: jax.Array, value: jax.Array) -> Tree:
  """Sets leaves and recomputes the nodes above them.

  Args:
    tree: the trees of all groups.
    group: [k] i32; out-of-range groups are ignored.
    leaf: [k, m] i32; out-of-range leaves are ignored. A leaf must not occur twice, since on some
      devices either value could win.
    value: [k, m] f32.

  Returns:
    The trees.
  """
  chex.assert_rank([group, leaf], [1, 2])
  chex.assert_equal_shape([leaf, value])
  chex.assert_equal_shape_prefix([group, leaf], 1)
  group = group[:, None]
  levels = [indexing.write(tree[0], group, leaf, value=value)]
  for above in tree[1:]:
    leaf, _ = indexing.divide(leaf, FANOUT)
    children = leaf[..., None] * FANOUT + jnp.arange(FANOUT)
    nodes = indexing.read_or(0.0, levels[-1], group[..., None], children)
    # Pairwise, in a fixed order.
    while nodes.shape[-1] > 1:
      nodes = nodes[..., ::2] + nodes[..., 1::2]
    levels.append(indexing.write(above, group, leaf, value=nodes[..., 0]))
  return tuple(levels)


def find(tree: Tree, mass: jax.Array, node: jax.Array | int = 0) -> jax.Array:
  """Returns the leaves [groups, m] i32 whose interval of the cumulative sum contains `mass`.

  A leaf of zero is never found if the sum is positive, even with rounding errors.

  Args:
    tree: the trees of all groups, or their lower levels.
    mass: [groups, m] f32, from 0 to the sum of the tree, or of the subtree below `node`.
    node: [groups, m] i32, the node of the tree's last level at which each search starts; 0 for the
      root of a whole tree.
  """
  chex.assert_rank(mass, 2)
  chex.assert_axis_dimension(tree[0], 0, len(mass))
  groups = jnp.arange(len(mass))[:, None, None]
  place = jnp.arange(FANOUT)
  node = jnp.broadcast_to(jnp.int32(node), mass.shape)
  for level in tree[-2::-1]:
    children = indexing.read(level, groups, node[..., None] * FANOUT + place)
    # Exclusive prefix sums of the children, in log2(16) additions.
    before = _shifted(children, 1)
    for by in (1, 2, 4, 8):
      before = before + _shifted(before, by)
    # Choose the last positive child that begins at or below the mass.
    candidates = (children > 0) & (before <= mass[..., None])
    chosen = jnp.max(jnp.where(candidates, place, 0), axis=-1)
    mass = mass - jnp.max(jnp.where(place == chosen[..., None], before, 0.0), axis=-1)
    node = node * FANOUT + chosen
  return node


def _shifted(x: jax.Array, by: int) -> jax.Array:
  """Returns x shifted right by `by` places along the last axis, filled with zeros."""
  return jnp.pad(x[..., :-by], [(0, 0)] * (x.ndim - 1) + [(by, 0)])


def draw(tree: Tree, keys: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Draws leaves in proportion to their values.

  Draws are stratified (Schaul et al. 2016, appendix B.2.1): one leaf from each of `count` equal
  parts of the sum. In a large tree float32 is too coarse for sums of all leaves, so that small
  leaves could not be told apart. Then each part selects a node above 4,096 leaves, and a second
  draw selects a leaf below it.

  Args:
    tree: the trees of all groups.
    keys: [groups], one PRNG key for each group.
    count: leaves to draw in each group.

  Returns:
    Leaves [groups, count] i32 in ascending order, and their probabilities within the group
    [groups, count] f32.
  """
  chex.assert_axis_dimension(tree[0], 0, len(keys))

  def uniform(stream):
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, stream), (count,)))(keys)

  def of_groups(function, *args):
    return lax.map(lambda group: function(*group), args)

  groups = jnp.arange(len(keys))
  whole = total(tree)[:, None]
  mass = of_groups(_strata, uniform(0), whole)
  if len(tree) > BLOCK_LEVELS + 1:
    node = find(tree[BLOCK_LEVELS:], mass)
    inside = of_groups(_share, uniform(1), indexing.read(tree[BLOCK_LEVELS], groups[:, None], node))
    # The second draw may disorder leaves of the same node.
    leaf = jnp.sort(find(tree[:BLOCK_LEVELS + 1], inside, node), axis=1)
  else:
    leaf = find(tree, mass)
  return leaf, of_groups(_probability, get(tree, groups, leaf), whole)


@island('strata')
def _strata(uniform: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns one point [count] in each of `count` equal parts of [0, whole]; whole is [1]."""
  count = len(uniform)
  return (jnp.arange(count) + uniform) * (1.0 / count) * whole


@island('share_of_node')
def _share(uniform: jax.Array, node: jax.Array) -> jax.Array:
  """Returns points [count] in [0, node], the sums of the nodes."""
  return uniform * node


@island('probability')
def _probability(leaf: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns the probabilities [count] of leaves with these values; 0 in an empty tree."""
  # The smallest mass of a leaf is about 1e-6^exponent, so 1e-30 only matters for an empty tree.
  return leaf / jnp.maximum(whole, 1e-30)
