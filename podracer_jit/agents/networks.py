"""Torsos (flax), and the actor-critic that is built around one.

A torso is a flax module [N, *obs] -> [N, features]; its fields are its options. A user's own torso
needs nothing more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit.agents import running_moments
from podracer_jit.agents.policies import Policy
from podracer_jit.numerics import convolution
from podracer_jit.options import internal, option, shown
from podracer_jit.types import Params

# Of one layer: more would be terabytes of weights between two such layers. And of layers: each is
# traced and compiled by itself.
MAX_UNITS, MAX_LAYERS = 2**20, 100

# What a network that the config names is; it says so by `provides`.
TORSO, POLICY_AND_CRITIC = 'a torso', 'a policy with a critic'

# (params, obs [T, N, ...], recurrent state before them, valid [T, N])
#   -> dist [T, N, K], value [T, N], recurrent state after them
Apply = Callable[[Params, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class Model(NamedTuple):
  """A network as losses and actors see it."""

  apply: Apply
  policy: Policy
  recurrent: bool = False


def orthogonal(scale: float) -> Callable:
  """flax's orthogonal initializer but for rounding: Gram and Schmidt's method, done twice over.

  The usual way is LAPACK's QR, whose last bits depend on the number of cores.
  """

  def init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    columns = shape[-1]
    rows = math.prod(shape) // columns
    numbers = jax.random.normal(key, (max(rows, columns), min(rows, columns)), dtype).T

    def row(i, done):
      x = numbers[i]
      for _ in range(2):  # once leaves rounding errors that matter
        x -= (done @ x) @ done
      return done.at[i].set(x / jnp.sqrt(jnp.sum(jnp.square(x))))

    basis = lax.fori_loop(0, len(numbers), row, jnp.zeros_like(numbers))
    return scale * (basis if rows < columns else basis.T).reshape(shape)

  return init


class Conv(nn.Module):
  """Square convolution on NHWC, over `conv.conv2d` (fast gradients in CPU loops).

  of: makes the image of what is given, again for the gradient, so that only what is given is kept
    for it: of bytes a quarter of the memory, and Nature CNN with its gradient 1.1 times as fast.
  """

  features: int
  kernel: int
  stride: int = 1
  padding: str = 'VALID'
  kernel_init: Callable = nn.initializers.lecun_normal()
  of: Callable | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def convolve(x, w):
      return convolution.conv2d(self.of(x) if self.of else x, w, self.stride, self.padding)

    channels = (jax.eval_shape(self.of, x) if self.of else x).shape[-1]
    w = self.param('kernel', self.kernel_init, (self.kernel, self.kernel, channels, self.features))
    b = self.param('bias', nn.initializers.zeros, (self.features,))
    return (jax.checkpoint(convolve) if self.of else convolve)(x, w) + b


def _image(obs: jax.Array) -> jax.Array:
  """[N, C, H, W] uint8 -> [N, H, W, C] f32 in [0, 1]; transposed while still bytes."""
  return lax.optimization_barrier(obs.transpose(0, 2, 3, 1)).astype(jnp.float32) / 255.0


def _centred_image(obs: jax.Array) -> jax.Array:
  """The same less its mean."""
  x = _image(obs)
  return x - jnp.mean(x, axis=(1, 2, 3), keepdims=True)


class ConvTorso(nn.Module):
  """Convolutions, on CPUs for a few rows at a time, then one dense layer on all of them.

  [N, C, H, W] -> [N, hidden].

  hidden: 0 for what the convolutions give, laid out flat.
  at_once: about how many 84x84x4 observations; see `conv.in_chunks`.
  """

  needs_images: ClassVar[bool] = True
  at_once = 16
  hidden: int = option(256, 'units of the dense layer', at_least=1, at_most=MAX_UNITS)
  chunked: bool = internal(True)

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    if self.chunked and not self.is_initializing():
      convolutions = self.clone(hidden=0, chunked=False, parent=None)
      apply = functools.partial(convolutions.apply, self.variables)
      x = convolution.in_chunks(apply, obs, self.at_once)
    else:
      x = self.convolve(obs).reshape(obs.shape[0], -1)
    return nn.relu(nn.Dense(self.hidden, kernel_init=self.dense_init)(x)) if self.hidden else x

  def split_last_layer(self) -> tuple[nn.Module, int]:
    """Returns the torso without its dense layer, and the units of that layer."""
    return self.clone(hidden=0), self.hidden


class NatureCNN(ConvTorso):
  """Mnih et al. (2015).

  A bright background drives a good part of the ReLUs of a small network to zero for good, how many
  depending on the seed; `centre` prevents that.
  """

  channels: Sequence[int] = option((32, 64, 64), 'output channels of each convolution', at_least=1,
                                   at_most=MAX_UNITS, max_length=MAX_LAYERS)
  kernels: Sequence[int] = option((8, 4, 3), 'width of each square kernel', at_least=1,
                                  at_most=1000, max_length=MAX_LAYERS)
  strides: Sequence[int] = option((4, 2, 1), 'stride of each convolution', at_least=1,
                                  at_most=1000, max_length=MAX_LAYERS)
  hidden: int = option(512, 'units of the dense layer', at_least=1, at_most=MAX_UNITS)
  centre: bool = option(False, "subtract each observation's mean first")
  dense_init = staticmethod(orthogonal(np.sqrt(2)))

  def problems(self) -> Iterator[str]:
    """Yields what is wrong with the options together, in a line each."""
    if not len(self.channels) == len(self.kernels) == len(self.strides):
      yield ('channels: channels, kernels and strides must be of equal length, got '
             f'{shown(tuple(self.channels))}, {shown(tuple(self.kernels))}, '
             f'{shown(tuple(self.strides))}')

  def convolve(self, x: jax.Array) -> jax.Array:
    """Of observations."""
    of = _centred_image if self.centre else _image
    for features, kernel, stride in zip(self.channels, self.kernels, self.strides, strict=True):
      x = nn.relu(Conv(features, kernel, stride, kernel_init=orthogonal(np.sqrt(2)), of=of)(x))
      of = None
    return x


class ResidualBlock(nn.Module):
  """Two 3x3 convolutions beside the identity."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = Conv(x.shape[-1], 3, padding='SAME')(nn.relu(x))
    return x + Conv(x.shape[-1], 3, padding='SAME')(nn.relu(y))


class ImpalaResNet(ConvTorso):
  """The deep network of IMPALA (1802.01561, figure 3), without the LSTM."""

  channels: Sequence[int] = option((16, 32, 32), 'output channels of each section', at_least=1,
                                   at_most=MAX_UNITS, max_length=MAX_LAYERS)
  blocks: int = option(2, 'residual blocks of a section', at_least=1, at_most=MAX_LAYERS)
  at_once = 24  # more than conv.VECTOR, which counts of kernel gradients of 16 channels
  dense_init = staticmethod(nn.initializers.lecun_normal())

  def convolve(self, x: jax.Array) -> jax.Array:
    """Of observations."""
    of = _image
    for features in self.channels:
      x = convolution.max_pool(Conv(features, 3, padding='SAME', of=of)(x), window=3, stride=2)
      of = None
      for _ in range(self.blocks):
        x = self.block()(x)
    return nn.relu(x)

  def block(self) -> nn.Module:
    """One of the residual blocks."""
    return ResidualBlock()


class FixupBlock(nn.Module):
  """A residual block without normalisation that begins as the identity (1901.09321, section 3).

  branches: how many such blocks the network has, L; a branch has two convolutions (m = 2), so the
  first is scaled by L^(-1/2). The last is zero; scalars stand before each convolution and ReLU.
  """

  branches: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    def scalar(name, value=0.0):
      return self.param(name, nn.initializers.constant(value), ())
    he = nn.initializers.variance_scaling(2.0 / self.branches, 'fan_in', 'truncated_normal')
    features = x.shape[-1]
    y = nn.relu(x + scalar('bias_0')) + scalar('bias_1')
    y = Conv(features, 3, padding='SAME', kernel_init=he)(y)
    y = nn.relu(y + scalar('bias_2')) + scalar('bias_3')
    y = Conv(features, 3, padding='SAME', kernel_init=nn.initializers.zeros)(y)
    return x + scalar('scale', 1.0) * y + scalar('bias_4')


class FixupResNet(ImpalaResNet):
  """IMPALA's network of Fixup's blocks, as NAPPO has it for Obstacle Tower (2007.02622)."""

  def block(self) -> nn.Module:
    """Likewise."""
    return FixupBlock(len(self.channels) * self.blocks)


class MLP(nn.Module):
  """Dense layers over the flattened observation, as floats."""

  hidden: Sequence[int] = option((64, 64), 'units of each layer', at_least=1, at_most=MAX_UNITS,
                                 max_length=MAX_LAYERS)

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    x = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
    for size in self.hidden:
      x = nn.tanh(nn.Dense(size, kernel_init=orthogonal(np.sqrt(2)))(x))
    return x

  def split_last_layer(self) -> tuple[nn.Module, int]:
    """Returns the torso without its last layer, and the units of that layer.

    Raises:
      ValueError: it has no layer.
    """
    if not self.hidden:
      raise ValueError('hidden: must have at least one layer, got ()')
    return self.clone(hidden=tuple(self.hidden[:-1])), self.hidden[-1]


TORSOS = {'impala_resnet': ImpalaResNet, 'fixup_resnet': FixupResNet, 'nature_cnn': NatureCNN,
          'mlp': MLP}
CORES = {'gru': nn.GRUCell, 'lstm': nn.OptimizedLSTMCell}


@dataclasses.dataclass(frozen=True)
class TorsoOptions:
  """What is built around a torso, whichever it is."""

  core: str = option('none', 'recurrent layer between torso and heads: none, gru or lstm',
                     choices=('none', *CORES))
  core_size: int = option(128, 'units of the recurrent layer', at_least=1, at_most=MAX_UNITS)
  separate_critic: bool = option(False, 'the value has a torso of its own')

  @property
  def recurrent(self) -> bool:
    """Whether there is a recurrent layer."""
    return self.core != 'none'

  def problems(self) -> Iterator[str]:
    """Yields what is wrong with the options together, in a line each."""
    if self.recurrent and self.separate_critic:
      yield (f'separate_critic: the critic would not remember; must be False with core = '
             f'{self.core}')


class ActorCritic(nn.Module):
  """A torso, by option a recurrent core, and heads for policy and value.

  Of a continuous policy the log standard deviations are parameters that no observation changes.
  """

  torso: nn.Module
  policy: Policy
  critic: nn.Module | None = None  # a torso of the value's own
  moments: Sequence[str] = ()  # what is normalised: 'obs', 'returns', 'values'
  core: str = ''  # '' or one of CORES
  core_size: int = 0

  @nn.compact
  def __call__(self, obs: jax.Array, core: Any = (), valid: jax.Array | None = None):
    """The network on T rows of N environments: (dist [T, N, K], value [T, N], core).

    Args:
      obs: [T, N, ...].
      core: the core's state before the first row, as of `initial_core`.
      valid: [T, N] bool, of recurrent networks: the row after an invalid one begins an episode, so
        it has an initial state.
    """
    rows = obs.shape[:2]
    obs = obs.reshape(-1, *obs.shape[2:])
    moments = {name: self.variable('moments', name, running_moments.initial, shape).value
               for name, shape in (('obs', obs.shape[1:]), ('returns', ()), ('values', ()))
               if name in self.moments}
    if 'obs' in moments:
      obs = running_moments.standardise(moments['obs'], obs.astype(jnp.float32))
    x = self.torso(obs)
    chex.assert_rank(x, 2)  # [N, features]
    if self.core:
      x, core = self._remember(x.reshape(*rows, -1), core, valid)
      x = x.reshape(-1, x.shape[-1])
    y = x if self.critic is None else self.critic(obs)
    outputs = self.policy.action_shape[0] if self.policy.action_shape else self.policy.dist_size
    dist = nn.Dense(outputs, kernel_init=orthogonal(0.01), name='policy')(x)
    if self.policy.action_shape:
      log_std = self.param('log_std', nn.initializers.zeros, (outputs,))
      dist = jnp.concatenate([dist, jnp.broadcast_to(log_std, dist.shape)], axis=-1)
    value = nn.Dense(1, kernel_init=orthogonal(1.0), name='value')(y)[:, 0]
    if 'values' in moments:
      value = running_moments.restore(moments['values'], value)
    return dist.reshape(*rows, -1), value.reshape(rows), core

  def _remember(self, x: jax.Array, core: Any, valid: jax.Array):
    """The core on x [T, N, F]: its outputs [T, N, H] and the state after the last row."""
    cell = CORES[self.core](self.core_size, recurrent_kernel_init=orthogonal(1.0), name='core')

    def row(cell, state, inputs):
      x, valid = inputs
      state, y = cell(state, x)
      return jax.tree.map(lambda s: jnp.where(valid[:, None], s, 0.0), state), y

    scan = nn.scan(row, variable_broadcast='params', split_rngs={'params': False})
    core, y = scan(cell, core, (x, valid))
    return y, core

  def initial_core(self, num_envs: int) -> Any:
    """The core's state where an episode starts, [N, H] each array; () without a core."""
    def zeros():  # each time others: states are donated
      return jnp.zeros((num_envs, self.core_size))
    return {'': (), 'gru': zeros(), 'lstm': (zeros(), zeros())}[self.core]


PLAIN = TorsoOptions()


def actor_critic(torso: nn.Module, policy: Policy, options: TorsoOptions = PLAIN,
                 moments: Sequence[str] = ()) -> ActorCritic:
  """Returns the actor-critic around a torso.

  Args:
    torso: [N, *obs] -> [N, features].
    policy: the policy whose distribution the network gives.
    options: the recurrent core, and whether the critic has a torso of its own.
    moments: what is normalised: 'obs', 'returns', 'values'.
  """
  critic = torso.clone() if options.separate_critic else None
  core = options.core if options.recurrent else ''
  return ActorCritic(torso, policy, critic, tuple(moments), core, options.core_size)


def init_params(network: nn.Module, key: jax.Array, obs_shape: Sequence[int], obs_dtype: Any
                ) -> Params:
  """Returns the network's first variables; traceable.

  Args:
    network: an `ActorCritic`, or a network that is called as one.
    key: what they are drawn with.
    obs_shape: of one observation.
    obs_dtype: of observations.
  """
  obs = jnp.zeros((1, 1, *obs_shape), obs_dtype)
  return network.init(key, obs, network.initial_core(1), jnp.ones((1, 1), bool))
