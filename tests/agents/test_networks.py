"""Shapes, sizes and small values of the networks, all computed by hand."""

import re

import envpool
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.agents import networks
from podracer_jit.agents.policies import categorical
from podracer_jit.configs import impala_atari
from podracer_jit.numerics import convolution
from tests.runs import changed, initial_state, make_network, prepared, run, small

FRAMES = jax.ShapeDtypeStruct((5, 4, 84, 84), np.uint8)
VECTORS = jax.ShapeDtypeStruct((5, 3, 7), np.float32)
IMAGE_TORSOS = [name for name, torso in networks.TORSOS.items()
                if getattr(torso, 'needs_images', False)]


def of_rows(network, params, obs):
  """Applies a network to rows [N, ...]; returns dist and value."""
  dist, value, _ = network.apply(params, obs[None])
  return dist[0], value[0]


def test_layers_in_chunks_have_the_norms_of_the_whole():
  torso = networks.NatureCNN(channels=(4, 8), kernels=(8, 3), strides=(4, 2), hidden=16,
                             layer_norm=True)
  obs = jax.random.randint(jax.random.key(0), FRAMES.shape, 0, 255).astype(np.uint8)
  variables = torso.init(jax.random.key(1), obs)
  scale = variables['params']['LayerNorm_hidden']['scale']
  variables['params']['LayerNorm_hidden']['scale'] = jnp.arange(1.0, 17.0)
  scaled = torso.apply(variables, obs)
  assert_allclose(scaled, torso.clone(chunked=False).apply(variables, obs), rtol=1e-5, atol=1e-6)
  variables['params']['LayerNorm_hidden']['scale'] = scale
  assert_allclose(scaled, jnp.arange(1.0, 17.0) * torso.apply(variables, obs), rtol=1e-5)


@pytest.mark.parametrize('torso, obs', [
    (networks.NatureCNN(centre=True, layer_norm=True), FRAMES),
    (networks.ImpalaResNet(channels=(4, 8), blocks=1, hidden=16), FRAMES),
    (networks.FixupResNet(channels=(4, 8), blocks=1, hidden=16), FRAMES),
    (networks.MLP(layer_norm=True), VECTORS),
    (networks.SimBa(hidden=16), VECTORS)])
def test_a_torso_in_bfloat16_has_its_products_and_gradients_in_it(torso, obs):
  obs = jax.random.randint(jax.random.key(0), obs.shape, 0, 255).astype(obs.dtype)
  variables = torso.init(jax.random.key(1), obs)
  other = networks.in_bfloat16(torso)
  assert jax.tree.all(jax.tree.map(lambda x: x.dtype == np.float32,
                                   other.init(jax.random.key(1), obs)))

  def loss(torso):
    return lambda variables: jnp.mean(jnp.square(jnp.float32(torso.apply(variables, obs))))

  program = str(jax.make_jaxpr(jax.grad(loss(other)))(variables))
  results = re.findall(r'(\w+)\[[^\]]*\] = (?:dot_general|conv_general_dilated)', program)
  assert len(results) > 2 and set(results) == {'bf16'}
  value, gradients = jax.jit(jax.value_and_grad(loss(torso)))(variables)
  near, near_gradients = jax.jit(jax.value_and_grad(loss(other)))(variables)
  assert float(near) == pytest.approx(float(value), rel=0.02) and near != value
  largest = max(jax.tree.leaves(jax.tree.map(jnp.linalg.norm, gradients)))
  for x, y in zip(*map(jax.tree.leaves, (gradients, near_gradients)), strict=True):
    assert jnp.linalg.norm(x - y) < 0.05 * largest


def _dense(fan_in, out):
  return (fan_in + 1) * out


# 84 -> 20 -> 9 -> 7 (VALID).
NATURE = (_dense(8 * 8 * 4, 32) + _dense(4 * 4 * 32, 64) + _dense(3 * 3 * 64, 64)
          + _dense(7 * 7 * 64, 512) + _dense(512, 6) + _dense(512, 1))
# 84 -> 42 -> 21 -> 11 (SAME); each of three stages has a convolution and two blocks of two.
RESNET = (_dense(9 * 4, 16) + 4 * _dense(9 * 16, 16) + _dense(9 * 16, 32) + 4 * _dense(9 * 32, 32)
          + _dense(9 * 32, 32) + 4 * _dense(9 * 32, 32)
          + _dense(11 * 11 * 32, 256) + _dense(256, 6) + _dense(256, 1))
MLP = _dense(3 * 7, 64) + _dense(64, 32) + _dense(32, 6) + _dense(32, 1)
# A LayerNorm has two numbers for each feature.
SIMBA = (_dense(3 * 7, 512) + 2 * (2 * 512 + _dense(512, 2048) + _dense(2048, 512)) + 2 * 512
         + _dense(512, 6) + _dense(512, 1))


@pytest.mark.parametrize('name, sizes, obs, count', [
    ('nature_cnn', {}, FRAMES, NATURE),
    ('impala_resnet', dict(channels=(16, 32, 32), hidden=256), FRAMES, RESNET),
    ('mlp', dict(hidden=(64, 32)), VECTORS, MLP),
    ('simba', dict(hidden=512, blocks=2), VECTORS, SIMBA)])
def test_shapes_and_parameter_counts(name, sizes, obs, count):
  network = make_network(name, categorical(6), **sizes)
  params = jax.eval_shape(lambda key, obs: network.init(key, obs[None]), jax.random.key(0), obs)
  assert sum(x.size for x in jax.tree.leaves(params)) == count
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
  logits, value = jax.eval_shape(lambda *args: of_rows(network, *args), params, obs)
  assert (logits.shape, logits.dtype) == ((5, 6), np.float32)
  assert (value.shape, value.dtype) == ((5,), np.float32)


def test_published_parameter_counts():
  """The sums above, written as plain numbers."""
  assert (NATURE, RESNET, MLP, SIMBA) == (1_687_719, 1_091_031, 3_719, 4_217_351)


@pytest.mark.parametrize('stride, expected', [
    # Pixels / 255 of the first channel: 0 1 .2; .4 .6 0, and 1 everywhere in the second.
    # (1 0 + 2 1 + 3 .4 + 4 .6) + 10 and (1 1 + 2 .2 + 3 .6 + 4 0) + 10, and the bias.
    (1, [15.6 + 0.5, 13.2 + 0.5]),
    (2, [15.6 + 0.5]),  # windows that do not overlap
])
def test_bytes_of_images_are_divided_by_255_and_convolved(stride, expected):
  """The dense layer doubles the sum of the convolution's outputs and subtracts 1."""
  obs = np.uint8([[[0, 255, 51], [102, 153, 0]], [[255] * 3] * 2])[None]
  torso = networks.NatureCNN(channels=(1,), kernels=(2,), strides=(stride,), hidden=1)
  kernel = np.zeros((2, 2, 2, 1), np.float32)
  kernel[:, :, 0, 0] = [[1, 2], [3, 4]]
  kernel[:, :, 1, 0] = 2.5
  params = {'params': {
      'Conv_0': {'kernel': kernel, 'bias': np.float32([0.5])},
      'Dense_0': {'kernel': np.full((len(expected), 1), 2, np.float32),
                  'bias': np.float32([-1])}}}
  assert_allclose(torso.apply(params, obs), [[2 * sum(expected) - 1]], rtol=1e-6)
  # Negative numbers become 0 after the convolution, then after the dense layer.
  params['params']['Conv_0']['bias'] = np.float32([-100])
  params['params']['Dense_0']['bias'] = np.float32([7])
  assert_array_equal(torso.apply(params, obs), [[7]])
  params['params']['Dense_0']['bias'] = np.float32([-7])
  assert_array_equal(torso.apply(params, obs), [[0]])


def test_centring_subtracts_the_mean_of_each_observation():
  """The mean of the bytes 0, 51, 102 and 255 is 0.4; a plain image becomes 0."""
  obs = np.uint8([[[[0, 51], [102, 255]]], [[[9, 9], [9, 9]]]])
  params = {'params': {
      'Conv_0': {'kernel': np.ones((1, 1, 1, 1), np.float32), 'bias': np.float32([0.5])},
      'Dense_0': {'kernel': np.float32([[1], [10], [100], [1000]]), 'bias': np.float32([0])}}}
  torso = networks.NatureCNN(channels=(1,), kernels=(1,), strides=(1,), hidden=1, centre=True)
  # 0, .2, .4, 1 less 0.4, and the bias: .1, .3, .5, 1.1.
  assert_allclose(torso.apply(params, obs), [[0.1 + 3 + 50 + 1100], [555.5]], rtol=1e-5)


@pytest.mark.parametrize('rows', [3, 40])  # all rows at once, and in chunks
@pytest.mark.parametrize('name', IMAGE_TORSOS)
def test_the_gradient_keeps_the_bytes_of_images_not_their_floats(name, rows):
  torso = networks.TORSOS[name]()
  obs = np.zeros((rows, 4, 84, 84), np.uint8)
  params = jax.eval_shape(torso.init, jax.random.key(0), obs[:1])
  kept = jax.eval_shape(lambda params: jax.vjp(lambda p: torso.apply(p, obs), params)[1], params)
  shapes = {(x.dtype, *x.shape[-3:]) for x in jax.tree.leaves(kept)}
  assert (np.dtype(np.uint8), 4, 84, 84) in shapes
  assert (np.dtype(np.float32), 84, 84, 4) not in shapes


def test_residual_block_by_hand():
  """Kernels with only a centre: y = 2 relu(x) + 1, then x + 3 relu(y) - 4."""
  x = np.random.default_rng(0).integers(-5, 6, size=(2, 4, 5, 1)).astype(np.float32)
  middle = np.zeros((3, 3, 1, 1), np.float32)
  middle[1, 1] = 1
  params = {'params': {'Conv_0': {'kernel': 2 * middle, 'bias': np.float32([1])},
                       'Conv_1': {'kernel': 3 * middle, 'bias': np.float32([-4])}}}
  expected = x + 3 * (2 * np.maximum(x, 0) + 1) - 4
  assert_array_equal(networks.ResidualBlock().apply(params, x), expected)


def _conv_same(x, w, b):
  """Convolves an image [H, W, C], padded with zeros, with a 3x3 kernel, in loops."""
  padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
  out = np.zeros((*x.shape[:2], w.shape[-1]))
  for i, j in np.ndindex(x.shape[:2]):
    out[i, j] = np.einsum('hwc,hwco->o', padded[i:i + 3, j:j + 3], w) + b
  return out


def _pool_same(x):
  """Takes the maximum of every second 3x3 window of [H, W, C], where H and W are odd."""
  padded = np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
  return np.array([[padded[i:i + 3, j:j + 3].max((0, 1)) for j in range(0, x.shape[1], 2)]
                   for i in range(0, x.shape[0], 2)])


def test_impala_resnet_as_in_the_paper():
  """1802.01561, figure 3: convolution, pooling and blocks, then a rectifier and a dense layer."""
  network = make_network('impala_resnet', categorical(2), channels=(2, 3), blocks=1, hidden=4)
  rng = np.random.default_rng(0)
  obs = rng.integers(256, size=(1, 2, 5, 9)).astype(np.uint8)
  shapes = jax.eval_shape(network.init, jax.random.key(0), obs[None])
  params = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)

  torso = params['params']['torso']
  x = obs[0].transpose(1, 2, 0) / 255
  for stage in range(2):
    w = torso[f'Conv_{stage}']
    x = _pool_same(_conv_same(x, w['kernel'], w['bias']))
    block = torso[f'ResidualBlock_{stage}']
    y = x
    for w in (block['Conv_0'], block['Conv_1']):
      y = _conv_same(np.maximum(y, 0), w['kernel'], w['bias'])
    x = x + y
  x = np.maximum(x, 0).reshape(-1)
  x = np.maximum(x @ torso['Dense_0']['kernel'] + torso['Dense_0']['bias'], 0)
  logits, value = of_rows(network, params, obs)
  heads = params['params']
  assert_allclose(logits[0], x @ heads['policy']['kernel'] + heads['policy']['bias'], rtol=1e-4)
  assert_allclose(value, x @ heads['value']['kernel'] + heads['value']['bias'], rtol=1e-4)


def test_impala_resnet_begins_with_orthogonal_weights_of_its_dense_layer():
  params = networks.ImpalaResNet(hidden=24).init(
      jax.random.key(0), np.zeros((1, 2, 9, 9), np.uint8))['params']
  dense = np.asarray(params['Dense_0']['kernel'], np.float64)  # 2 x 2 x 32 features
  assert dense.shape == (128, 24)
  assert_allclose(dense.T @ dense, 2 * np.eye(24), atol=1e-5)


@pytest.mark.quick
def test_mlp_by_hand():
  network = make_network('mlp', categorical(2), hidden=(1,))
  heads = {'policy': {'kernel': np.float32([[1, -1]]), 'bias': np.float32([0, 3])},
           'value': {'kernel': np.float32([[10]]), 'bias': np.float32([0.5])}}
  torso = {'Dense_0': {'kernel': np.float32([[1], [2], [0.25]]), 'bias': np.float32([-1])}}
  for obs in (np.int32([[[1], [0], [2]]]), np.float32([[[1], [0], [2]]])):
    logits, value = of_rows(network, {'params': {'torso': torso, **heads}}, obs)
    y = np.tanh(0.5)  # 1 + 0 + 0.5 - 1
    assert_allclose(logits, [[y, 3 - y]], rtol=1e-6)
    assert_allclose(value, [10 * y + 0.5], rtol=1e-6)


def _layer_norm(x, params):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def _linear(x, params):
  return x @ params['kernel'] + params['bias']


def test_simba_as_in_the_paper():
  """2410.09754, section 4: a linear layer, residual blocks, then LayerNorm."""
  torso = networks.SimBa(hidden=5, blocks=2)
  rng = np.random.default_rng(0)
  obs = rng.integers(-3, 4, size=(6, 2, 3))
  shapes = jax.eval_shape(torso.init, jax.random.key(0), obs)
  variables = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)

  params = jax.tree.map(np.float64, variables['params'])
  x = _linear(obs.reshape(6, 6), params['Dense_0'])
  for i in range(2):
    block = params[f'PreNormBlock_{i}']
    assert block['Dense_0']['kernel'].shape == (5, 20)
    y = np.maximum(_linear(_layer_norm(x, block['LayerNorm_0']), block['Dense_0']), 0)
    x = x + _linear(y, block['Dense_1'])
  assert_allclose(torso.apply(variables, obs), _layer_norm(x, params['LayerNorm_0']), rtol=1e-4,
                  atol=1e-5)
  grads = jax.grad(lambda p: jnp.sum(jnp.sin(torso.apply(p, obs))))(variables)
  assert all(np.any(g) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize('name, bound', [  # of 400 inputs and 256 outputs
    ('fan_in', 1 / np.sqrt(400)), ('xavier', np.sqrt(6 / (400 + 256)))])
def test_weights_of_an_mlp_begin_uniform_within_a_bound(name, bound):
  network = networks.MLP(hidden=(256,), weight_init=name)
  params = network.init(jax.random.key(1), jnp.zeros((1, 400)))['params']['Dense_0']
  weights = np.asarray(params['kernel'])
  assert 0.999 * bound < np.abs(weights).max() <= bound * (1 + 1e-6)
  assert np.std(weights) == pytest.approx(bound / np.sqrt(3), rel=0.01)
  assert not np.any(params['bias'])


def test_simba_begins_with_orthogonal_and_he_weights():
  params = networks.SimBa(hidden=256).init(jax.random.key(0), np.zeros((1, 300)))['params']
  first = np.asarray(params['Dense_0']['kernel'], np.float64)
  assert_allclose(first.T @ first, np.eye(256), atol=1e-5)
  for i, fan_in in enumerate((256, 1024)):
    kernel = params['PreNormBlock_0'][f'Dense_{i}']['kernel']
    assert kernel.shape[0] == fan_in
    assert_allclose(np.std(kernel), np.sqrt(2 / fan_in), rtol=0.02)
  assert list(params) == ['Dense_0', 'PreNormBlock_0', 'LayerNorm_0']


@pytest.mark.parametrize('loss, task, fields', [
    ('ppo', 'CartPole-v1', dict(normalise__obs=True, network__separate_critic=True)),
    ('impala', 'CartPole-v1', {}), ('pqn', 'CartPole-v1', {}), ('dqn', 'CartPole-v1', {}),
    ('r2d2', 'CartPole-v1', dict(network__core='gru', network__core_size=8, loss__burn_in=2,
                                 loss__trace_length=4, loss__n_step=2)),
    ('sac', 'Pendulum-v1', {}), ('td3', 'Pendulum-v1', dict(loss__policy_delay=1)),
    ('examples.vmpo:VMPO', 'CartPole-v1', dict(num_minibatches=1)),
    ('examples.ppg:PPG', 'CartPole-v1', dict(
        network__separate_critic=True, loss__policy_updates=2, loss__aux_minibatches=1)),
    ('examples.rnd:RND', 'CartPole-v1', dict(loss__embedding=5))])
def test_simba_learns_with_any_algorithm_that_takes_a_torso(loss, task, fields):
  """Each array changes, of an actor-critic, a dueling network, critics and a predictor."""
  config = changed(small(loss, task, 'simba'), network__hidden=8, **fields)
  if 'replay' in config:
    config['num_minibatches'] = 1
    config['replay'] |= dict(capacity=256, min_size=16, batch_size=16, gradient_steps=2)
  prepared_run = prepared(config)
  before = jax.device_get(initial_state(prepared_run).params)
  receipts, _, state = run(config, updates=4)
  assert len({params for _, params in receipts}) >= 3
  for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before),
                              jax.tree.leaves(jax.device_get(state.params)), strict=True):
    assert np.all(np.isfinite(new)) and not np.array_equal(old, new), jax.tree_util.keystr(path)


def test_centring_makes_outputs_independent_of_brightness():
  dark = np.random.default_rng(0).integers(0, 200, (3, 2, 20, 20)).astype(np.uint8)
  sizes = dict(channels=(4, 8), kernels=(4, 3), strides=(2, 1), hidden=16)
  for centre in (True, False):
    network = make_network('nature_cnn', categorical(6), centre=centre, **sizes)
    params = network.init(jax.random.key(0), dark[None])
    outputs = [jnp.concatenate([x.ravel() for x in of_rows(network, params, obs)])
               for obs in (dark, dark + np.uint8(50))]
    assert np.allclose(*outputs, rtol=1e-4, atol=1e-5) == centre


def test_impalas_nature_cnn_has_no_channels_that_give_nothing_on_pong():
  """Unless images are centred, a bright background makes some of the first ReLUs 0 everywhere."""
  env = envpool.make_gymnasium('Pong-v5', num_envs=8, seed=1)
  env.reset()
  for action in np.random.default_rng(0).integers(0, 6, (60, 8)):
    obs = env.step(action)[0]

  def inactive_channels(config):
    params = initial_state(prepared(config)).params['params']['torso']
    first = networks.NatureCNN(channels=(32,), kernels=(8,), strides=(4,), hidden=0,
                               centre=config.network.centre)
    activations = first.apply({'params': {'Conv_0': params['Conv_0']}}, obs)
    return np.sum(np.max(activations.reshape(-1, 32), axis=0) == 0)

  shipped = changed(impala_atari.get_config('nature_cnn'), env__task='Pong-v5')
  assert inactive_channels(shipped) == 0
  assert inactive_channels(changed(shipped, network__centre=False)) >= 6


@pytest.mark.parametrize('shape', [(512, 256), (64, 64), (3, 3, 4, 16), (3, 3, 16, 32), (5, 7)])
def test_orthogonal_weights_equal_those_of_lapacks_qr(shape):
  """flax's initializer draws the same numbers, and uses LAPACK's QR."""
  key = jax.random.key(3)
  ours = np.asarray(networks.orthogonal(1.5)(key, shape))
  np.testing.assert_allclose(ours, nn.initializers.orthogonal(1.5)(key, shape), atol=3e-6)
  matrix = ours.reshape(-1, shape[-1]).astype(np.float64)
  gram = matrix @ matrix.T if len(matrix) < shape[-1] else matrix.T @ matrix
  np.testing.assert_allclose(gram, 2.25 * np.eye(len(gram)), atol=1e-5)


def test_an_orthogonal_initializer_is_traced_once_for_each_shape(monkeypatch):
  """flax asks it for the shape of a weight at each use of the weight."""
  calls = []
  normal = jax.random.normal
  monkeypatch.setattr(jax.random, 'normal', lambda *args: calls.append(args) or normal(*args))
  for shape in ((5, 7), (5, 7), (7, 5), (5, 7)):
    # No network has this scale.
    jax.eval_shape(lambda key, shape=shape: networks.orthogonal(0.123)(key, shape),
                   jax.random.key(0))
  assert len(calls) == 2


def test_a_fixup_block_is_the_identity_at_first_and_its_first_kernel_is_small():
  x = np.random.default_rng(0).normal(size=(2, 9, 9, 32)).astype(np.float32)
  block = networks.FixupBlock(branches=6)
  params = block.init(jax.random.key(0), x)
  assert_array_equal(block.apply(params, x), x)
  weights = params['params']
  deviation = np.sqrt(2 / (9 * 32)) / np.sqrt(6)
  assert_allclose(np.std(weights['Conv_0']['kernel']), deviation, rtol=0.05)
  assert_array_equal(weights['Conv_1']['kernel'], 0)
  names = {f'bias_{i}': 0.0 for i in range(5)} | {'scale': 1.0}
  assert {k: v for k, v in weights.items() if 'Conv' not in k} == names


def test_a_fixup_block_by_hand():
  """On an image of one pixel only the centres of the kernels count: 2 and 3."""
  centre = np.zeros((2, 3, 3, 1, 1), np.float32)
  centre[:, 1, 1] = np.float32([[[2]], [[3]]])
  params = {'params': {
      'Conv_0': {'kernel': centre[0], 'bias': np.zeros(1, np.float32)},
      'Conv_1': {'kernel': centre[1], 'bias': np.zeros(1, np.float32)},
      'bias_0': 0.5, 'bias_1': -1.0, 'bias_2': 4.0, 'bias_3': 0.25, 'bias_4': 10.0, 'scale': 2.0}}
  y = 2 * (max(1.0 + 0.5, 0) - 1)
  y = 3 * (max(y + 4, 0) + 0.25)
  assert_allclose(networks.FixupBlock(1).apply(params, np.ones((1, 1, 1, 1), np.float32)),
                  [[[[1 + 2 * y + 10]]]])


@pytest.mark.parametrize('torso', ['impala_resnet', 'fixup_resnet'])
def test_kernel_gradients_of_16_channels_take_more_than_16_rows_at_a_time(torso):
  """The rows of a chunk are the input channels of this convolution; YNNPACK needs more than 16."""
  chunk_rows = networks.TORSOS[torso].chunk_rows
  assert networks.TORSOS[torso].channels[0] == convolution.VECTOR
  for count in range(convolution.VECTOR + 1, 700):
    assert convolution.rows_at_once(count, (4, 84, 84), chunk_rows) > convolution.VECTOR
