"""Traces a function once for a program that needs it more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun


def traced(function: Callable, *args: Any) -> tuple[Callable, Any]:
  """Traces a function of pytrees of arrays.

  A loop that carries a sum needs the shapes of what it adds before it begins. With
  `jax.eval_shape` the function would be traced for these, and then again for the loop. Each level
  of nested loops would double that: a gradient would be traced eight times.

  Args:
    function: may close over traced arrays.
    *args: arrays of the shapes and types that it gets in the program.

  Returns:
    A function with the same results for arguments of these shapes and types, which does not call
    `function` again; and the shapes and types of the results, as `jax.eval_shape` returns them.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  compute = jaxpr_as_fun(closed)
  treedef = jax.tree.structure(shapes)

  def computed(*args: Any) -> Any:
    return jax.tree.unflatten(treedef, compute(*jax.tree.leaves(args)))

  return computed, shapes


def zeros(shapes: Any) -> Any:
  """Returns a pytree of zeros of these shapes and types."""
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
