"""Torsos and the actor-critic head (flax). Observations come as EnvPool gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer_jit import conv


def _orthogonal(scale: float) -> Callable:
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
  """Square convolution on NHWC, over `conv.conv2d` (fast gradients in CPU loops)."""

  features: int
  kernel: int
  stride: int = 1
  padding: str = 'VALID'
  kernel_init: Callable = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    shape = (self.kernel, self.kernel, x.shape[-1], self.features)
    w = self.param('kernel', self.kernel_init, shape)
    b = self.param('bias', nn.initializers.zeros, (self.features,))
    return conv.conv2d(x, w, self.stride, self.padding) + b


def _image(obs: jax.Array) -> jax.Array:
  """[N, C, H, W] uint8 -> [N, H, W, C] f32 in [0, 1]; transposed while still bytes."""
  return lax.optimization_barrier(obs.transpose(0, 2, 3, 1)).astype(jnp.float32) / 255.0


class NatureCNN(nn.Module):
  """Mnih et al. (2015): convolutions, then one dense layer; [N, C, H, W] -> [N, hidden].

  centre: subtract each observation's mean first. A bright background otherwise drives a good part
  of the ReLUs of a small network to zero for good, how many depending on the seed.
  """

  channels: Sequence[int] = (32, 64, 64)
  kernels: Sequence[int] = (8, 4, 3)
  strides: Sequence[int] = (4, 2, 1)
  hidden: int = 512
  centre: bool = False

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    x = _image(obs)
    if self.centre:
      x -= jnp.mean(x, axis=(1, 2, 3), keepdims=True)
    for features, kernel, stride in zip(self.channels, self.kernels, self.strides, strict=True):
      x = nn.relu(Conv(features, kernel, stride, kernel_init=_orthogonal(np.sqrt(2)))(x))
    x = x.reshape(x.shape[0], -1)
    return nn.relu(nn.Dense(self.hidden, kernel_init=_orthogonal(np.sqrt(2)))(x))


class ResidualBlock(nn.Module):
  """Two 3x3 convolutions beside the identity."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = Conv(x.shape[-1], 3, padding='SAME')(nn.relu(x))
    return x + Conv(x.shape[-1], 3, padding='SAME')(nn.relu(y))


class ImpalaResNet(nn.Module):
  """The deep network of IMPALA (1802.01561, figure 3), without the LSTM."""

  channels: Sequence[int] = (16, 32, 32)
  blocks: int = 2
  hidden: int = 256

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    x = _image(obs)
    for features in self.channels:
      x = conv.max_pool(Conv(features, 3, padding='SAME')(x), window=3, stride=2)
      for _ in range(self.blocks):
        x = ResidualBlock()(x)
    x = nn.relu(x).reshape(x.shape[0], -1)
    return nn.relu(nn.Dense(self.hidden)(x))


class MLP(nn.Module):
  """Dense layers over the flattened observation, as floats."""

  hidden: Sequence[int] = (64, 64)

  @nn.compact
  def __call__(self, obs: jax.Array) -> jax.Array:
    x = obs.reshape(obs.shape[0], -1).astype(jnp.float32)
    for size in self.hidden:
      x = nn.tanh(nn.Dense(size, kernel_init=_orthogonal(np.sqrt(2)))(x))
    return x


TORSOS = {'impala_resnet': ImpalaResNet, 'nature_cnn': NatureCNN, 'mlp': MLP}
IMAGE_TORSOS = ('impala_resnet', 'nature_cnn')


class ActorCritic(nn.Module):
  """A torso with a categorical head and a value head: obs [N, ...] -> logits [N, A], value [N]."""

  torso: nn.Module
  num_actions: int

  @nn.compact
  def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = self.torso(obs)
    logits = nn.Dense(self.num_actions, kernel_init=_orthogonal(0.01), name='policy')(x)
    value = nn.Dense(1, kernel_init=_orthogonal(1.0), name='value')(x)
    return logits, value[:, 0]


def make(name: str, num_actions: int, **sizes: Any) -> ActorCritic:
  """The network called `name` with its sizes (see each torso's fields)."""
  return ActorCritic(TORSOS[name](**sizes), num_actions)
