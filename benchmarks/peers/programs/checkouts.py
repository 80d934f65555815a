"""Runs a script of Cleanba's or CleanRL's checkout with the sizes of one of our configs.

checkouts.py CONFIG RECORDS cleanba|cleanrl CHECKOUT

The scripts are of earlier years. Nothing of a checkout is changed; this program runs
CHECKOUT/cleanba/cleanba_impala.py or CHECKOUT/cleanrl/ppo_atari_envpool.py with these differences:

- Module `gym` is Gymnasium, and EnvPool's results have the four parts of gym's old interface.
- TensorBoard's writer is replaced by one that only notes the updates.
- Cleanba's network, the IMPALA ResNet, is the Nature CNN.
- Cleanba gets one virtual CPU device for its actor and one for its learner, the fastest of six
  layouts on two cores.
- Cleanba's `lax.scan` over minibatches is unrolled, since XLA's gradients of convolutions are 15 to
  50 times slower inside a loop on CPUs.
- Cleanba runs on jax 0.5.3, in a virtual environment of its own: later versions run its program at
  half the speed, and lack functions that it calls.
"""

import ast
import os
import sys
import types
from pathlib import Path

import envpool
import gymnasium
import numpy as np
from records import arguments

SCRIPTS = dict(cleanba='cleanba/cleanba_impala.py', cleanrl='cleanrl/ppo_atari_envpool.py')
# The scalar that is written after each update; its step is the count of steps.
COUNTED = dict(cleanba='charts/SPS_update', cleanrl='charts/SPS')
FAR = 2 * 10**9  # steps of a training that does not end by itself


class OldGym:
  """A pool of EnvPool with gym's interface before 0.26: `done`, and no info of `reset`."""

  def __init__(self, pool):
    """Wraps a pool."""
    self._pool = pool
    self.observation_space = pool.observation_space
    self.action_space = pool.action_space
    self.spec = pool.spec

  def reset(self, **_):
    return self._pool.reset()[0]

  def step(self, action):
    return self._four(self._pool.step(action))

  def async_reset(self):
    self._pool.async_reset()

  def send(self, action, env_id):
    self._pool.send(action, env_id)

  def recv(self):
    return self._four(self._pool.recv())

  def close(self):
    self._pool.close()

  def _four(self, results):
    obs, reward, terminated, truncated, info = results
    return obs, reward, terminated | truncated, info


class Wrapper:
  """gym's wrapper, which lets all attributes through; Gymnasium's does not."""

  def __init__(self, env):
    """Wraps an environment."""
    self.env = env

  def reset(self, **options):
    return self.env.reset(**options)

  def step(self, action):
    return self.env.step(action)

  def __getattr__(self, name):
    return getattr(self.env, name)


def use_gymnasium():
  """Makes `import gym` and `envpool.make(env_type='gym')` work without gym."""
  gym = types.ModuleType('gym')
  gym.Wrapper = Wrapper
  gym.spaces = gymnasium.spaces
  sys.modules['gym'] = gym
  envpool.make = lambda task, env_type, **options: OldGym(envpool.make_gymnasium(task, **options))


def use_records(records, counted):
  """Replaces TensorBoard's writers by one that notes updates."""

  class Writer:
    def __init__(self, *_, **__):
      pass

    def add_text(self, *_, **__):
      pass

    def add_scalar(self, name, value, step):
      if name == counted:
        records.write(step)

    def close(self):
      pass

  for name in ('tensorboardX', 'torch.utils.tensorboard'):
    module = types.ModuleType(name)
    module.SummaryWriter = Writer
    sys.modules[name] = module


def adapt_jax():
  """Gives JAX two CPU devices, unrolls short scans, and lets flax have Cleanba's parameters."""
  import flax
  import jax
  jax.config.update('jax_num_cpu_devices', 2)
  if not hasattr(jax, 'tree_map'):
    jax.tree_map = jax.tree.map
  scan = jax.lax.scan

  def unrolled(f, init, xs=None, length=None, **options):
    lengths = {len(x) for x in jax.tree.leaves(xs)} or {length}
    if max(lengths) <= 8:  # minibatches, not steps
      options['unroll'] = max(lengths)
    return scan(f, init, xs, length, **options)

  jax.lax.scan = unrolled
  dataclass = flax.struct.dataclass

  def searchable(cls):
    cls.__contains__ = lambda self, name: False  # flax looks for a name among the parameters
    return dataclass(cls)

  flax.struct.dataclass = searchable


def nature_cnn():
  """Returns the Nature CNN with the arguments of Cleanba's network, which it ignores."""
  import flax.linen as nn
  import jax.numpy as jnp

  class Network(nn.Module):
    channels: tuple = ()
    hiddens: tuple = ()

    @nn.compact
    def __call__(self, x):
      x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
      orthogonal = nn.initializers.orthogonal(np.sqrt(2))
      for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = nn.relu(nn.Conv(features, (size, size), (stride, stride), 'VALID',
                            kernel_init=orthogonal)(x))
      return nn.relu(nn.Dense(512, kernel_init=orthogonal)(x.reshape(len(x), -1)))

  return Network


def flags_of(peer, config):
  """Returns the script's flags."""
  loss = config['loss']
  optimizer = config['optimizer']
  num_envs = config['env']['num_envs']
  flags = {
      'env-id': config['env']['task'], 'total-timesteps': FAR, 'num-steps': config['unroll_length'],
      'learning-rate': optimizer['learning_rate'], 'num-minibatches': config['num_minibatches'],
      'max-grad-norm': optimizer['max_grad_norm'], 'gamma': loss['discount'],
      'ent-coef': loss['entropy_coef']}
  if peer == 'cleanba':
    flags |= {'local-num-envs': num_envs, 'num-actor-threads': 1, 'actor-device-ids': 0,
              'learner-device-ids': 1, 'vf-coef': loss['baseline_coef'], 'log-frequency': 1}
  else:
    flags |= {'num-envs': num_envs, 'update-epochs': config['num_epochs'],
              'gae-lambda': loss['gae_lambda'], 'clip-coef': loss['clip'],
              'vf-coef': loss['value_coef']}
  words = [word for name, value in flags.items() for word in (f'--{name}', str(value))]
  if peer == 'cleanrl':
    words += ['--clip-vloss' if loss['clip_value'] else '--no-clip-vloss', '--no-cuda']
  return words


def main():
  """Runs the script until the process is ended."""
  config, records, (peer, checkout) = arguments()
  path = Path(checkout) / SCRIPTS[peer]
  use_gymnasium()
  use_records(records, COUNTED[peer])
  tree = ast.parse(path.read_text(), str(path))
  variables = dict(__name__='__main__', __file__=str(path))
  if peer == 'cleanba':
    adapt_jax()
    tree.body = [node for node in tree.body
                 if not (isinstance(node, ast.ClassDef) and node.name == 'Network')]
    variables['Network'] = nature_cnn()
  elif threads := os.environ.get('OMP_NUM_THREADS'):
    import torch
    torch.set_num_threads(int(threads))
  sys.argv = [str(path), *flags_of(peer, config)]
  # Dataclasses and tyro look for the script's module.
  module = sys.modules['__main__']
  vars(module).update(variables)
  exec(compile(tree, str(path), 'exec'), vars(module))  # noqa: S102


if __name__ == '__main__':
  main()
