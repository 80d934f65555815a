"""Action masks: the part of an observation that says which actions are legal.

The mask stays in the observation while this is stored, sent, fingerprinted and replayed, so none of
that knows of masks. Two places do:

- `Masked`, around the network of an algorithm (`Algorithm.network`), takes the mask out of what the
  network reads. It replaces the logits, or the values, of illegal actions by the lowest number. So
  all that reads them sees legal actions only: policies, losses, entropies, maxima, exports. The
  probability of an illegal action is exactly 0, and no gradient reaches what was replaced.
- `among_legal` lets a policy explore among legal actions, if it does not look at the values.

A valid row without a legal action is a fault of the environment (`actor.faults`). The last
observation of an episode may have none, since the action after it is ignored. Nothing is masked
there, so its value, from which a truncated episode bootstraps, is the network's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit.agents.policies import Policy
from podracer_jit.envs import spaces
from podracer_jit.envs.protocol import EnvSpec, ObsPart
from podracer_jit.types import Carry, Params

# The mask of a task.


def find(spec: EnvSpec, name: str, is_optional: bool = False) -> EnvSpec:
  """Returns the spec of a task with its action mask.

  Args:
    spec: of the task, without a mask.
    name: `env.action_mask`: the part of observations that is the mask, or a tuple of masks, one for
      each element of an action; '' for none.
    is_optional: observations may have no such part.

  Raises:
    ValueError: there is no such part, or it cannot be a mask; the message is one line.
  """
  parts = [part for part in spec.parts if f'{part.name}/'.startswith(f'{name}/')]
  if not name or not parts and is_optional:
    return spec
  if not parts:
    names = ', '.join(part.name for part in spec.parts)
    raise ValueError(f'env.action_mask: the observations of {spec.task} have no part {name!r}; '
                     + (f'their parts are {names}' if names else 'they are a single array'))
  for problem in _problems(spec, name, parts):
    raise ValueError(f'env.action_mask: the part {name} of the observations of {spec.task} '
                     f"{problem}; if it is no mask, env.action_mask must be ''")
  size = sum(part.size for part in parts)
  return spec._replace(action_mask=ObsPart(name, (size,), np.dtype(bool), parts[0].start))


def _problems(spec: EnvSpec, name: str, parts: list[ObsPart]) -> Iterator[str]:
  """Yields why parts of observations are no mask, each as the end of a sentence."""
  choices = choices_of(spec)
  if not choices:
    yield 'cannot mask actions, which are continuous'
    return
  count = len(choices)
  masks = [(size,) for size in choices]
  fitting = [masks, [(sum(choices),)]]
  if len(set(choices)) == 1:
    fitting.append([(count, choices[0])])
  shapes = [part.shape for part in parts]
  in_order = len(parts) == 1 or [part.name for part in parts] == [
      f'{name}/{i}' for i in range(count)]
  if not in_order or shapes not in fitting:
    wanted = f'must be {masks[0]}'
    if count > 1:
      wanted = f'must be a tuple of {", ".join(map(str, masks))}, one for each element'
    yield (f'is {", ".join(map(str, shapes))}; actions are {" x ".join(map(str, choices))} '
           f'choices, so a mask {wanted}')
  wrong = [part.dtype for part in parts if part.dtype not in (bool, np.int8)]
  if wrong:
    yield f'is {wrong[0]}; a mask must be int8 or bool'
  if len(parts) == len(spec.parts):
    yield 'is the whole observation, so the network would see nothing'


def choices_of(spec: EnvSpec) -> tuple[int, ...]:
  """Returns the number of choices of each element of an action; () if actions are continuous."""
  return spec.action_choices or ((spec.num_actions,) if spec.num_actions else ())


def seen(spec: EnvSpec) -> EnvSpec:
  """Returns the spec with the observations that the network sees.

  These are what the task would give without the part that is the mask. If one array is left, it
  keeps its own shape and type; bits (MultiBinary) become bool.
  """
  if spec.action_mask is None:
    return spec
  first, end = _place(spec)
  parts = [part._replace(start=part.start - (end - first) * (part.start >= end))
           for part in spec.parts if not first <= part.start < end]
  dtype = spaces.flat_dtype(parts)
  if len(parts) == 1:
    (part,) = parts
    return spec._replace(obs_shape=part.shape, obs_dtype=part.dtype, parts=(),
                         channels_last=part.channels_last, action_mask=None)
  return spec._replace(obs_shape=(spec.obs_shape[0] - (end - first),), obs_dtype=dtype,
                       parts=tuple(parts), action_mask=None)


def _place(spec: EnvSpec) -> tuple[int, int]:
  """Returns the first element of the mask in flat observations, and the one after it."""
  mask = spec.action_mask
  return mask.start, mask.start + mask.size


# The mask of observations.


def split(obs: Any, spec: EnvSpec) -> tuple[Any, jax.Array | None]:
  """Returns what the network sees of observations, and which actions are legal.

  An algorithm calls it for a network beside that of `make_network`, which gets it anyway.

  Args:
    obs: [..., *spec.obs_shape]; any other form of them if the task has no mask.
    spec: of the task.

  Returns:
    [..., *seen(spec).obs_shape] and [..., K] bool, an element for each choice; `obs` and None if
    the task has no mask. If an element of an action has no legal choice, all of them are True.
  """
  if spec.action_mask is None:
    return obs, None
  chex.assert_axis_dimension(obs, -1, spec.obs_shape[0])
  first, end = _place(spec)
  # Most masks are first, as names are sorted. XLA's CPU backend is slow at concatenations.
  rest = [x for x in (obs[..., :first], obs[..., end:]) if x.shape[-1]]
  rest = rest[0] if len(rest) == 1 else jnp.concatenate(rest, axis=-1)
  shown = seen(spec)
  rest = rest.reshape(*obs.shape[:-1], *shown.obs_shape).astype(shown.obs_dtype)
  legal = [x | ~jnp.any(x, axis=-1, keepdims=True) for x in _by_element(obs, spec)]
  return rest, legal[0] if len(legal) == 1 else jnp.concatenate(legal, axis=-1)


def without_choice(obs: Any, spec: EnvSpec) -> Any:
  """Returns whether an element of an action has no legal choice, [..., elements] bool.

  Args:
    obs: [..., D], of NumPy or JAX.
    spec: of a task with a mask.
  """
  xnp = obs.__array_namespace__()
  return xnp.stack([~x.any(axis=-1) for x in _by_element(obs, spec)], axis=-1)


def _by_element(obs: Any, spec: EnvSpec) -> list[Any]:
  """Returns the masks of the elements of an action, [..., choices] bool each."""
  ends = _place(spec)[0] + np.cumsum(choices_of(spec))
  return [obs[..., end - size:end] != 0
          for end, size in zip(ends, choices_of(spec), strict=True)]


# Logits and values of illegal actions.


def lowest(dtype: Any) -> jax.Array:
  """Returns the number in place of logits and values of illegal actions.

  It is half of the lowest number, so that a difference with any logit is finite.
  """
  return jnp.finfo(dtype).min / 2


def restrict(numbers: jax.Array, legal: jax.Array | None) -> jax.Array:
  """Returns logits or values [..., K], those of illegal actions replaced by the lowest number."""
  return numbers if legal is None else jnp.where(legal, numbers, lowest(numbers.dtype))


@dataclasses.dataclass(frozen=True)
class Masked:
  """Network of an algorithm on a task with an action mask, in place of a flax module.

  The flax module inside sees no mask. What it returns first, logits or values [..., K], is
  restricted to legal actions. If its `__call__` takes `legal`, [..., K] bool, it gets that, too,
  for what it derives from the values. Its variables are those that it has without a mask.
  """

  network: nn.Module
  spec: EnvSpec

  def init(self, key: Any, obs: jax.Array, *args: Any, **others: Any) -> Params:
    """Returns the variables of the inner network; see `nn.Module.init`.

    Args:
      key: PRNG key.
      obs: [..., *spec.obs_shape].
      *args: further arguments of the inner network.
      **others: further arguments of the inner network.

    Raises:
      ValueError: see `apply`.
    """
    rest, legal = split(obs, self.spec)
    outputs, params = self.network.init_with_output(key, rest, *args, **others,
                                                    **self._known(legal))
    self._restricted(outputs, legal)
    return params

  def apply(self, params: Params, obs: jax.Array, *args: Any, method: str | None = None,
            **others: Any) -> Any:
    """Returns what the inner network does; see the class and `nn.Module.apply`.

    Args:
      params: variables of the inner network.
      obs: [..., *spec.obs_shape].
      *args: further arguments of the inner network.
      **others: further arguments of the inner network.
      method: a method in place of `__call__`; its result is not restricted.

    Raises:
      ValueError: the network returns something else than [..., K] first.
    """
    rest, legal = split(obs, self.spec)
    if method is not None:
      return self.network.apply(params, rest, *args, method=method, **others)
    outputs = self.network.apply(params, rest, *args, **others, **self._known(legal))
    return self._restricted(outputs, legal)

  def _restricted(self, outputs: Any, legal: jax.Array) -> Any:
    """Returns the outputs of the inner network, of which the first are restricted."""
    numbers, *more = outputs if isinstance(outputs, tuple) else (outputs,)
    shape = getattr(numbers, 'shape', type(numbers).__name__)
    if shape != legal.shape:
      raise ValueError(f'env.action_mask masks {legal.shape[-1]} choices, so the network must '
                       f'return {legal.shape} first, a number for each choice; it returns {shape}')
    numbers = restrict(numbers, legal)
    if hasattr(outputs, '_fields'):
      return type(outputs)(numbers, *more)
    return (numbers, *more) if isinstance(outputs, tuple) else numbers

  def _known(self, legal: jax.Array) -> dict[str, jax.Array]:
    """Returns the argument `legal`, if the inner network takes it."""
    takes = inspect.signature(type(self.network).__call__).parameters
    return {'legal': legal} if 'legal' in takes else {}

  def initial_carry(self, num_envs: int) -> Carry:
    """Returns the inner network's carry at an episode's start."""
    return self.network.initial_carry(num_envs)


def masked(network: nn.Module, spec: EnvSpec) -> nn.Module | Masked:
  """Returns the network for a task: `Masked` if the task has a mask, else the network itself."""
  return network if spec.action_mask is None else Masked(network, spec)


def among_legal(policy: Policy, spec: EnvSpec) -> Policy:
  """Returns the policy that explores among legal actions.

  An illegal action is replaced by one that is uniform among the legal ones. So if exploration is
  uniform among all actions, it is uniform among the legal ones now.

  Args:
    policy: reads logits or values that were restricted.
    spec: of a task with a mask.
  """
  if policy.explore is None:
    return policy
  choices = choices_of(spec)

  def explore(key, numbers, exploration):
    key, *keys = jax.random.split(key, 1 + len(choices))
    action = policy.explore(key, numbers, exploration)
    elements = action if policy.action_shape else action[..., None]
    legal = jnp.split(numbers > lowest(numbers.dtype), np.cumsum(choices)[:-1], axis=-1)
    taken = []
    for i, (key, is_legal) in enumerate(zip(keys, legal, strict=True)):
      element = elements[..., i]
      uniform = jax.random.categorical(key, restrict(jnp.zeros(is_legal.shape), is_legal))
      fits = jnp.take_along_axis(is_legal, element[..., None], axis=-1)[..., 0]
      taken.append(jnp.where(fits, element, uniform.astype(element.dtype)))
    return jnp.stack(taken, axis=-1) if policy.action_shape else taken[0]

  return policy._replace(explore=explore)
