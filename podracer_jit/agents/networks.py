"""Torsos (flax), and the actor-critic network built around a torso.

A torso is a flax module [N, *obs] -> [N, features]; its fields are its options. A user's own torso
needs nothing else. With a field `dtype` it can compute in bfloat16, see `in_bfloat16`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.agents import running_moments
from podracer_jit.agents.policies import Policy
from podracer_jit.envs.protocol import EnvSpec, ObsPart, take_apart
from podracer_jit.numerics import convolution, indexing, precision
from podracer_jit.options import internal, option, shown
from podracer_jit.types import Carry

# The weights between two larger layers would take terabytes.
MAX_UNITS = 2**20

# Each layer is traced and compiled by itself.
MAX_LAYERS = 100

# Roles of a network that the config names; the network declares its role in `provides`.
TORSO = 'a torso'
POLICY_AND_CRITIC = 'a policy with a critic'

_ACTIVATIONS = {'tanh': nn.tanh, 'relu': nn.relu, 'elu': nn.elu}


@functools.cache
def orthogonal(scale: float) -> Callable:
  """Returns an orthogonal initializer, computed by the Gram-Schmidt method.

  It equals flax's initializer up to rounding. flax calls LAPACK's QR, whose last bits depend on the
  number of cores.
  """

  # flax traces the initializer of a weight each time that the weight is used. With `jit` and the
  # cache above, it is traced once for each shape.
  @functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
  def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    columns = shape[-1]
    rows = math.prod(shape) // columns
    numbers = jax.random.normal(key, (max(rows, columns), min(rows, columns)), dtype).T

    def add_row(i, basis):
      x = indexing.read(numbers, i)
      # One pass would leave rows that are not orthogonal to within rounding.
      for _ in range(2):
        # In fewer bits than float32 has, GPUs and TPUs would leave rows that are not orthogonal.
        with precision.products(precision.HIGHEST):
          x -= (basis @ x) @ basis
      return indexing.write_row(basis, x / jnp.sqrt(jnp.sum(jnp.square(x))), i)

    basis = lax.fori_loop(0, len(numbers), add_row, jnp.zeros_like(numbers))
    return scale * (basis if rows < columns else basis.T).reshape(shape)

  return init


def normalised(torso: nn.Module, x: jax.Array, name: str | None = None) -> jax.Array:
  """Returns a layer's outputs [N, ..., F] after LayerNorm over F, if the torso has it.

  Args:
    torso: the module that calls it, with the fields `layer_norm` and `dtype`.
    x: the outputs.
    name: of the LayerNorm's parameters; None: by their order.
  """
  return nn.LayerNorm(dtype=torso.dtype, name=name)(x) if torso.layer_norm else x


class Conv(nn.Module):
  """Square convolution on NHWC, by `convolution.conv2d`, whose gradients are fast in CPU loops.

  A first layer gets raw observations, and keeps only these for the gradient, which makes the image
  a second time: uint8 takes a quarter of the memory of float32.
  """

  features: int  # output channels
  kernel: int  # width of the square kernel
  stride: int = 1
  padding: str = 'VALID'
  kernel_init: Callable = nn.initializers.lecun_normal()
  # Maps pixels [N, ...], in any order, to floats; None: this is no first layer, x are floats.
  to_image: Callable | None = None
  channels_last: bool = True  # x is [N, H, W, C]; only a first layer may get [N, C, H, W]
  dtype: Any = None  # of the arithmetic; None: of the arguments

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the convolution [N, H', W', features] of x."""
    def to_image(pixels):
      return self.to_image(pixels).astype(self.dtype or jnp.float32)

    def first(x, w):
      return convolution.conv2d_of_pixels(x, w, self.stride, self.padding, to_image,
                                          self.channels_last)

    def convolve(x, w):
      return convolution.conv2d(x, w, self.stride, self.padding)

    channels = x.shape[-1 if self.channels_last else 1]
    w = self.param('kernel', self.kernel_init, (self.kernel, self.kernel, channels, self.features))
    b = self.param('bias', nn.initializers.zeros, (self.features,))
    if self.dtype is not None:
      x, w, b = (x if self.to_image else x.astype(self.dtype), w.astype(self.dtype),
                 b.astype(self.dtype))
    return (jax.checkpoint(first) if self.to_image else convolve)(x, w) + b


def _image(pixels: jax.Array) -> jax.Array:
  """Returns pixels [N, ...] as f32; bytes become 0 to 1."""
  image = pixels.astype(jnp.float32)
  return image / 255.0 if pixels.dtype == np.uint8 else image


def _centred_image(pixels: jax.Array) -> jax.Array:
  """Returns the result of `_image`, from which each image's mean is subtracted."""
  x = _image(pixels)
  return x - jnp.mean(x, axis=(1, 2, 3), keepdims=True)


class ConvTorso(nn.Module):
  """Convolutions, followed by one dense layer: [N, C, H, W] -> [N, hidden].

  The task says whether its images are [N, C, H, W] or [N, H, W, C]; see `fit_to_task`.

  On CPUs the convolutions process a few rows at a time, so that their activations fit the cache;
  the dense layer processes all rows together. With hidden = 0 the result is the flattened output of
  the convolutions.
  """

  needs_images: ClassVar[bool] = True
  # Rows in a chunk, for observations of 84x84x4; see `convolution.in_chunks`.
  chunk_rows = 16
  hidden: int = option(256, 'units of the dense layer', at_least=1, at_most=MAX_UNITS)
  chunked: bool = internal(True)
  channels_last: bool = internal(False)  # observations are [N, H, W, C]
  # Options of torsos that have them.
  layer_norm: bool = internal(False)
  activation: str = internal('relu')
  dtype: Any = internal(None)  # see `in_bfloat16`

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns features [N, hidden] of observations [N, C, H, W], or [N, H, W, C]."""
    chex.assert_rank(obs, 4)
    if self.chunked and not self.is_initializing():
      convolutions = self.clone(hidden=0, chunked=False, parent=None)
      apply = functools.partial(convolutions.apply, self.variables)
      x = convolution.in_chunks(apply, obs, self.chunk_rows)
    else:
      x = self.convolve(obs).reshape(obs.shape[0], -1)
    if not self.hidden:
      return x
    dense = nn.Dense(self.hidden, kernel_init=self.dense_init, dtype=self.dtype)
    # With a name of its own: in chunks, the layer norms of the convolutions are made by another
    # module, so an automatic number would begin at 0 again.
    return _ACTIVATIONS[self.activation](normalised(self, dense(x), name='LayerNorm_hidden'))

  def split_last_layer(self) -> tuple[nn.Module, int]:
    """Returns the torso without its dense layer, and the units of that layer."""
    return self.clone(hidden=0), self.hidden


class NatureCNN(ConvTorso):
  """Convolutional torso of Mnih et al. (2015).

  With a bright background, many ReLUs are 0 for every image, or become so; how many depends on the
  seed. The option `centre` prevents this.
  """

  channels: Sequence[int] = option((32, 64, 64), 'output channels of each convolution', at_least=1,
                                   at_most=MAX_UNITS, max_length=MAX_LAYERS)
  kernels: Sequence[int] = option((8, 4, 3), 'width of each square kernel', at_least=1,
                                  at_most=1000, max_length=MAX_LAYERS)
  strides: Sequence[int] = option((4, 2, 1), 'stride of each convolution', at_least=1,
                                  at_most=1000, max_length=MAX_LAYERS)
  hidden: int = option(512, 'units of the dense layer', at_least=1, at_most=MAX_UNITS)
  centre: bool = option(False, "subtract each observation's mean first")
  activation: str = option('relu', 'relu or elu', choices=('relu', 'elu'))
  layer_norm: bool = option(False, 'LayerNorm between each layer and its activation')
  dense_init = staticmethod(orthogonal(np.sqrt(2)))

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    if not len(self.channels) == len(self.kernels) == len(self.strides):
      yield ('channels: channels, kernels and strides must be of equal length, got '
             f'{shown(tuple(self.channels))}, {shown(tuple(self.kernels))}, '
             f'{shown(tuple(self.strides))}')

  def convolve(self, x: jax.Array) -> jax.Array:
    """Returns the last convolution's activations [N, H', W', C'] of observations x."""
    first = dict(to_image=_centred_image if self.centre else _image,
                 channels_last=self.channels_last)
    for features, kernel, stride in zip(self.channels, self.kernels, self.strides, strict=True):
      x = Conv(features, kernel, stride, kernel_init=orthogonal(np.sqrt(2)), dtype=self.dtype,
               **first)(x)
      x = _ACTIVATIONS[self.activation](normalised(self, x))
      first = {}
    return x


class ResidualBlock(nn.Module):
  """Residual block: the sum of its input and two 3x3 convolutions."""

  dtype: Any = None  # of the arithmetic

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array shaped like x [N, H, W, C]."""
    y = Conv(x.shape[-1], 3, padding='SAME', dtype=self.dtype)(nn.relu(x))
    return x + Conv(x.shape[-1], 3, padding='SAME', dtype=self.dtype)(nn.relu(y))


class ImpalaResNet(ConvTorso):
  """The deep network of IMPALA (1802.01561, figure 3), without the LSTM.

  Its dense layer is initialised as in Cleanba (2310.00036).
  """

  channels: Sequence[int] = option((16, 32, 32), 'output channels of each section', at_least=1,
                                   at_most=MAX_UNITS, max_length=MAX_LAYERS)
  blocks: int = option(2, 'residual blocks of a section', at_least=1, at_most=MAX_LAYERS)
  # The rows are the input channels of a kernel gradient. XLA uses its faster convolution for more
  # than `convolution.VECTOR` of them, although the layers have only 16 channels.
  chunk_rows = 24
  dense_init = staticmethod(orthogonal(np.sqrt(2)))

  def convolve(self, x: jax.Array) -> jax.Array:
    """Returns the last section's activations [N, H', W', C'] of observations x."""
    first = dict(to_image=_image, channels_last=self.channels_last)
    for features in self.channels:
      x = Conv(features, 3, padding='SAME', dtype=self.dtype, **first)(x)
      x = convolution.max_pool(x, window=3, stride=2)
      first = {}
      for _ in range(self.blocks):
        x = self.block()(x)
    return nn.relu(x)

  def block(self) -> nn.Module:
    """Returns a new residual block."""
    return ResidualBlock(self.dtype)


class FixupBlock(nn.Module):
  """Residual block without normalisation, initially the identity (1901.09321, section 3).

  A branch has two convolutions (m = 2), so the first is initialised with a scale of L^(-1/2), and
  the last with zeros. A scalar bias precedes each convolution and ReLU.
  """

  branches: int  # L, the number of residual blocks in the network
  dtype: Any = None  # of the arithmetic

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array shaped like x [N, H, W, C]."""
    def scalar(name, value=0.0):
      return jnp.asarray(self.param(name, nn.initializers.constant(value), ()), x.dtype)

    he = nn.initializers.variance_scaling(2.0 / self.branches, 'fan_in', 'truncated_normal')
    features = x.shape[-1]
    y = nn.relu(x + scalar('bias_0')) + scalar('bias_1')
    y = Conv(features, 3, padding='SAME', kernel_init=he, dtype=self.dtype)(y)
    y = nn.relu(y + scalar('bias_2')) + scalar('bias_3')
    y = Conv(features, 3, padding='SAME', kernel_init=nn.initializers.zeros, dtype=self.dtype)(y)
    return x + scalar('scale', 1.0) * y + scalar('bias_4')


class FixupResNet(ImpalaResNet):
  """IMPALA's network with Fixup blocks, as in NAPPO for Obstacle Tower (2007.02622)."""

  def block(self) -> nn.Module:
    """Returns a new Fixup block."""
    return FixupBlock(len(self.channels) * self.blocks, self.dtype)


_WEIGHT_INITS = {
    'orthogonal': orthogonal(np.sqrt(2)),
    'xavier': nn.initializers.xavier_uniform(),
    'fan_in': nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
}


class MLP(nn.Module):
  """Multilayer perceptron on flattened observations."""

  hidden: Sequence[int] = option((64, 64), 'units of each layer', at_least=1, at_most=MAX_UNITS,
                                 max_length=MAX_LAYERS)
  activation: str = option('tanh', 'tanh, relu or elu', choices=tuple(_ACTIVATIONS))
  weight_init: str = option('orthogonal', 'weights at first: orthogonal, or uniform by Xavier, or '
                            'uniform within 1 / sqrt(inputs)',
                            choices=tuple(_WEIGHT_INITS))
  layer_norm: bool = option(False, 'LayerNorm between each layer and its activation')
  dtype: Any = internal(None)  # see `in_bfloat16`

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns the last layer's activations [N, hidden[-1]] of observations [N, ...]."""
    x = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
    activate = _ACTIVATIONS[self.activation]
    init = _WEIGHT_INITS[self.weight_init]
    for size in self.hidden:
      dense = nn.Dense(size, kernel_init=init, dtype=self.dtype)
      x = activate(normalised(self, dense(x)))
    return x

  def split_last_layer(self) -> tuple[nn.Module, int]:
    """Returns the torso without its last layer, and the units of that layer.

    Raises:
      ValueError: the torso has no layer.
    """
    if not self.hidden:
      raise ValueError('hidden: must have at least one layer, got ()')
    return self.clone(hidden=tuple(self.hidden[:-1])), self.hidden[-1]


class PreNormBlock(nn.Module):
  """Residual block of SimBa: the sum of its input and an MLP on its input's LayerNorm."""

  dtype: Any = None  # of the arithmetic

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array shaped like x [N, F]."""
    features = x.shape[-1]
    dense = functools.partial(nn.Dense, kernel_init=nn.initializers.he_normal(), dtype=self.dtype)
    y = nn.relu(dense(4 * features)(nn.LayerNorm(dtype=self.dtype)(x)))
    return x + dense(features)(y)


class SimBa(nn.Module):
  """Residual network of SimBa (2410.09754, section 4) on flattened observations.

  The defaults are the sizes of the paper's actor. Its critic has hidden = 512 and blocks = 2; here
  actor and critic have the same sizes. The paper's running statistics of observations are
  `normalise.obs`, which not all algorithms with a replay have. The paper trains with AdamW.
  """

  hidden: int = option(128, 'width of the residual stream', at_least=1, at_most=MAX_UNITS)
  blocks: int = option(1, 'residual blocks', at_least=1, at_most=MAX_LAYERS)
  dtype: Any = internal(None)  # see `in_bfloat16`

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns features [N, hidden] of observations [N, ...]."""
    x = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
    x = nn.Dense(self.hidden, kernel_init=orthogonal(1.0), dtype=self.dtype)(x)
    for _ in range(self.blocks):
      x = PreNormBlock(self.dtype)(x)
    return nn.LayerNorm(dtype=self.dtype)(x)


class ImageAndVector(nn.Module):
  """Convolutions on the images among an observation's parts, and an MLP on all other parts.

  Use it for tasks whose observations are dicts, such as MiniGrid's image, direction and mission.
  The features of all images and of the other parts are concatenated.
  """

  needs_parts: ClassVar[bool] = True

  channels: Sequence[int] = option((16, 32), 'output channels of each convolution', at_least=1,
                                   at_most=MAX_UNITS, max_length=MAX_LAYERS)
  kernel: int = option(3, 'width of each square kernel', at_least=1, at_most=1000)
  largest: float = option(255.0, 'integers in images are divided by this number; 10 for MiniGrid',
                          above=0)
  image_hidden: int = option(128, 'features of each image', at_least=1, at_most=MAX_UNITS)
  vector_hidden: Sequence[int] = option((64,), 'units of each layer on the other parts',
                                        at_least=1, at_most=MAX_UNITS, max_length=MAX_LAYERS)
  parts: Sequence[ObsPart] = internal(())  # see `fit_to_task`
  dtype: Any = internal(None)  # see `in_bfloat16`

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    """Returns features [N, F] of flat observations [N, D]."""
    chex.assert_rank(obs, 2)
    arrays = take_apart(obs, self.parts)
    features = []
    vectors = []
    for part in self.parts:
      x = arrays[part.name]
      if part.is_image:
        features.append(self._look(x if part.channels_last else x.transpose(0, 2, 3, 1)))
      else:
        vectors.append(self._vector(x))
    if vectors:
      mlp = MLP(self.vector_hidden, dtype=self.dtype)
      features.append(mlp(jnp.concatenate(vectors, axis=1)))
    return jnp.concatenate(features, axis=1)

  def _vector(self, x: jax.Array) -> jax.Array:
    """Returns a part [N, ...] as features [N, D].

    Bytes, such as the letters of a text, become numbers from 0 to 1.
    """
    x = x / 255.0 if x.dtype == np.uint8 else x.astype(jnp.float32)
    return x.reshape(len(x), -1)

  def _look(self, image: jax.Array) -> jax.Array:
    """Returns features [N, image_hidden] of an image [N, H, W, C]."""
    x = image.astype(jnp.float32)
    if jnp.issubdtype(image.dtype, jnp.integer):
      x = x / self.largest
    for channels in self.channels:
      x = nn.relu(Conv(channels, self.kernel, kernel_init=orthogonal(np.sqrt(2)),
                       dtype=self.dtype)(x))
    x = x.reshape(len(x), -1)
    dense = nn.Dense(self.image_hidden, kernel_init=orthogonal(np.sqrt(2)), dtype=self.dtype)
    return nn.relu(dense(x))


def role_of(part: type[nn.Module]) -> str:
  """Returns the role of a config's network: its attribute `provides`, or TORSO."""
  return getattr(part, 'provides', TORSO)


def fit_to_task(network: nn.Module, spec: EnvSpec) -> nn.Module:
  """Returns the network, told the facts about a task's observations that it has fields for.

  These fields are no options. `channels_last: bool = internal(False)` says whether images are
  (H, W, C). `parts: Sequence[ObsPart] = internal(())` lists the parts of a flat observation. A
  network may have none of these fields.
  """
  facts = {'channels_last': spec.channels_last, 'parts': spec.parts}
  fields = {field.name for field in dataclasses.fields(network)}
  used = {name: value for name, value in facts.items() if value and name in fields}
  return network.clone(**used) if used else network


def in_bfloat16(torso: nn.Module) -> nn.Module:
  """Returns the torso computing in bfloat16; its parameters stay in float32.

  Raises:
    ValueError: it has no field `dtype: Any = internal(None)`, which flax's layers take.
  """
  if 'dtype' not in {field.name for field in dataclasses.fields(torso)}:
    raise ValueError('numerics.precision: bfloat16 needs a network with a field dtype; '
                     f'{type(torso).__name__} has none, so it must be highest or default')
  return torso.clone(dtype=jnp.bfloat16)


def features_of(torso: nn.Module, obs: jax.Array) -> jax.Array:
  """Returns the features [N, F] that a torso gives for observations [N, ...]; bfloat16 as float32.

  Raises:
    ValueError: the torso, which may be a user's own, returns something else.
  """
  features = torso(obs)
  shape = getattr(features, 'shape', None)
  if shape is None or len(shape) != 2 or shape[0] != len(obs):
    returned = type(features).__name__ if shape is None else f'an array {shape}'
    raise ValueError(f'a torso must return features [N, F]: one row for each of the {len(obs)} '
                     f'observations; it returns {returned}')
  return features.astype(jnp.float32) if features.dtype == jnp.bfloat16 else features


TORSOS = {'impala_resnet': ImpalaResNet, 'fixup_resnet': FixupResNet, 'nature_cnn': NatureCNN,
          'mlp': MLP, 'simba': SimBa, 'image_and_vector': ImageAndVector}
CORES = {'gru': nn.GRUCell, 'lstm': nn.OptimizedLSTMCell}


@dataclasses.dataclass(frozen=True)
class TorsoOptions:
  """Options of the network that is built around any torso."""

  core: str = option('none', 'recurrent layer between torso and heads: none, gru or lstm',
                     choices=('none', *CORES))
  core_size: int = option(128, 'units of the recurrent layer', at_least=1, at_most=MAX_UNITS)
  separate_critic: bool = option(False, 'the value has a torso of its own')

  @property
  def recurrent(self) -> bool:
    """True if the network has a recurrent layer."""
    return self.core != 'none'

  @property
  def core_name(self) -> str:
    """The recurrent layer as networks get it: one of CORES, or '' for none."""
    return self.core if self.recurrent else ''

  def problems(self) -> Iterator[str]:
    """Yields problems of the combination of options, one line each."""
    if self.recurrent and self.separate_critic:
      yield (f'separate_critic: the critic would not remember; must be False with core = '
             f'{self.core}')


class ActorCritic(nn.Module):
  """Actor-critic network: a torso, an optional recurrent core, and heads for policy and value.

  The log standard deviations of a continuous policy are parameters; they do not depend on the
  observation.
  """

  torso: nn.Module
  policy: Policy
  critic: nn.Module | None = None  # separate torso of the value; None: the two share `torso`
  moments: Sequence[str] = ()  # normalised quantities: 'obs', 'returns', 'values'
  core: str = ''  # recurrent core, one of CORES; '' for none
  core_size: int = 0  # H, units of the core
  # Auxiliary heads by name, which only losses call:
  # (features [N, F], action [N, *action_shape]) -> [N, ...]
  heads: Mapping[str, nn.Module] | None = None

  @nn.compact
  def __call__(self, obs: jax.Array, carry: Carry = None,
               valid: jax.Array | None = None, action: jax.Array | None = None):
    """Returns (dist_params [T, N, K], value [T, N], carry) of T rows of N environments.

    With actions, it also returns the outputs of the auxiliary heads, {name: [T, N, ...]}.

    Args:
      obs: [T, N, ...], observations.
      carry: of the core before the first row, shaped like `initial_carry`.
      valid: [T, N] bool, used by recurrent networks only. The row after an invalid row begins an
        episode, so its carry is the initial one.
      action: [T, N, ...], the actions that the auxiliary heads read; None: they are not computed.
    """
    if self.core:
      chex.assert_shape(valid, obs.shape[:2])
    rows = obs.shape[:2]
    obs = obs.reshape(-1, *obs.shape[2:])

    obs, moments = standardised(self, obs)
    x = features_of(self.torso, obs)
    if self.core:
      x, carry = remember(self.core, self.core_size, x.reshape(*rows, -1), carry, valid)
      x = x.reshape(-1, x.shape[-1])
    y = x if self.critic is None else features_of(self.critic, obs)

    continuous = np.issubdtype(self.policy.action_dtype, np.floating)
    outputs = self.policy.action_shape[0] if continuous else self.policy.dist_size
    dist_params = nn.Dense(outputs, kernel_init=orthogonal(0.01), name='policy')(x)
    if continuous:
      log_std = self.param('log_std', nn.initializers.zeros, (outputs,))
      log_std = jnp.broadcast_to(log_std, dist_params.shape)
      dist_params = jnp.concatenate([dist_params, log_std], axis=-1)

    value = nn.Dense(1, kernel_init=orthogonal(1.0), name='value')(y)[:, 0]
    if 'values' in moments:
      value = running_moments.restore(moments['values'], value)
    outputs = dist_params.reshape(*rows, -1), value.reshape(rows), carry
    if self.heads and self.is_initializing() and action is None:
      self._auxiliary(x, jnp.zeros((*rows, *self.policy.action_shape), self.policy.action_dtype))
    return outputs if action is None else (*outputs, self._auxiliary(x, action))

  def _auxiliary(self, features: jax.Array, action: jax.Array) -> dict[str, jax.Array]:
    """Returns the heads' outputs on features [T * N, F] and actions [T, N, ...]."""
    rows = action.shape[:2]
    flat = action.reshape(-1, *action.shape[2:])
    by_name = {name: head(features, flat) for name, head in (self.heads or {}).items()}
    return jax.tree.map(lambda x: x.reshape(*rows, *x.shape[1:]), by_name)

  def initial_carry(self, num_envs: int) -> Carry:
    """Returns the carry at an episode's start, arrays [N, H]; None without a core."""
    return initial_carry(self.core, self.core_size, num_envs)


def standardised(network: nn.Module, obs: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
  """Returns observations [N, ...], by their moments if the network has them, and all its moments.

  Call it in the compact method of a network whose field `moments` names them: 'obs', 'returns' or
  'values'.
  """
  moments = {name: network.variable('moments', name, running_moments.initial, shape).value
             for name, shape in (('obs', obs.shape[1:]), ('returns', ()), ('values', ()))
             if name in network.moments}
  if 'obs' in moments:
    obs = running_moments.standardise(moments['obs'], running_moments.as_numbers(obs))
  return obs, moments


def remember(core: str, size: int, x: jax.Array, carry: Carry, valid: jax.Array
             ) -> tuple[jax.Array, Carry]:
  """Applies a recurrent core to rows; call it in a module's compact method, whose part it becomes.

  Args:
    core: one of CORES.
    size: H, its units.
    x: [T, N, F].
    carry: before the first row, shaped like `initial_carry`.
    valid: [T, N] bool; the row after an invalid one has the initial carry.

  Returns:
    The outputs [T, N, H], and the carry after the last row.
  """
  cell = CORES[core](size, recurrent_kernel_init=orthogonal(1.0), name='core')

  def row(cell, state, inputs):
    x, valid = inputs
    state, y = cell(state, x)
    return jax.tree.map(lambda s: jnp.where(valid[:, None], s, 0.0), state), y

  scan = nn.scan(row, variable_broadcast='params', split_rngs={'params': False})
  carry, y = scan(cell, carry, (x, valid))
  return y, carry


def initial_carry(core: str, size: int, num_envs: int) -> Carry:
  """Returns a core's carry at an episode's start, arrays [N, H]; None without a core."""
  # Each array gets a buffer of its own, since states are donated.
  def zeros():
    return jnp.zeros((num_envs, size))
  return {'': None, 'gru': zeros(), 'lstm': (zeros(), zeros())}[core]


PLAIN = TorsoOptions()


def actor_critic(torso: nn.Module, policy: Policy, options: TorsoOptions = PLAIN,
                 moments: Sequence[str] = ()) -> ActorCritic:
  """Returns the actor-critic network around a torso.

  Args:
    torso: a module [N, *obs] -> [N, features].
    policy: the policy that reads the network's `dist_params`.
    options: the recurrent core, and whether the critic has a separate torso.
    moments: normalised quantities, of 'obs', 'returns' and 'values'.

  Returns:
    The network, a flax module.
  """
  critic = torso.clone() if options.separate_critic else None
  return ActorCritic(torso, policy, critic, tuple(moments), options.core_name, options.core_size)
