"""Configs of the runs whose workdirs are kept; each is deterministic and has a few thousand bytes.

podracer_jit --config=tests/workdirs/tiny.py:NAME --workdir=...
"""

from podracer_jit import experiment

TOTAL_STEPS = 400  # six updates, or a few more where steps that reset do not count


def _config(loss='ppo', network='mlp', scheme='sync', optimizer='rmsprop', **fields):
  """Returns a config of 8 environments and 8 steps an update.

  RMSProp has one array for each parameter, which makes checkpoints smaller than Adam's two.
  """
  config = experiment.config(loss, network, optimizer, scheme=scheme, unroll_length=8, **fields)
  config.env.num_envs = 8
  config.env.task = 'CartPole-v1'
  config.optimizer.anneal = False
  config.checkpoint.every_updates = 3
  config.checkpoint.keep = 9
  config.log.tensorboard = False
  config.placement.xla_threads = 2
  config.total_steps = TOTAL_STEPS
  if network == 'mlp':
    config.network.hidden = (4,)
  return config


def moments():
  """All running statistics, with a lag."""
  config = _config(scheme='cleanba', optimizer='adam')
  config.env.task = 'Pendulum-v1'
  config.normalise.obs = config.normalise.reward = config.normalise.value = True
  return config


def recurrent():
  """A core with a state."""
  config = _config('impala')
  config.network.core = 'gru'
  config.network.core_size = 4
  return config


def _replay(loss, network, task):
  """Returns a config with a small replay that is full before the checkpoint."""
  config = _config(loss, network, 'apex_lockstep')
  config.env.task = task
  config.loss.target_every = 3
  config.replay.capacity = 128
  config.replay.min_size = 64
  config.replay.batch_size = 8
  return config


def fifo_replay():
  """A replay of rows in time order."""
  return _replay('dqn', 'mlp', 'Catch-v0')


def prioritised_replay():
  """A replay of whole transitions that evicts by priority, and EnvPool's observations in parts."""
  config = _replay('dpg', 'deterministic', 'CartpoleSwingup-v1')
  config.network.actor_hidden = config.network.critic_hidden = (4,)
  config.loss.separate_optimizers = False  # as in all versions until 0.8
  config.replay.eviction = 'prioritised'
  return config


def jax_replay():
  """A replay, and own environments of JAX functions, which go on from one segment to the next."""
  return _replay('dqn', 'mlp', 'tiny_envs:Corridor')


def grouped_replay():
  """Two gradient groups; until version 0.8 each had a replay of its own."""
  config = _replay('dqn', 'mlp', 'Catch-v0')
  config.num_shards = config.num_grad_shards = 2
  return config


def gymnax():
  """Environments that are JAX functions, of gymnax."""
  config = _config(scheme='fused')
  config.env.task = 'gymnax:CartPole-v1'
  return config


def own_jax():
  """An own environment of JAX functions, with running statistics."""
  config = _config()
  config.env.task = 'tiny_envs:Corridor'
  config.normalise.obs = True
  return config


def dict_of_boxes():
  """An own environment of Gymnasium whose observations are a Dict of Boxes."""
  config = _config()
  config.env.task = 'tiny_envs:Boxes'
  return config


def dict_with_discrete():
  """An own environment of Gymnasium whose observations have a Discrete part and an image."""
  config = _config()
  config.env.task = 'tiny_envs:Mixed'
  return config


def changed():
  """A run that goes on with other fields, and is extended."""
  return _config('impala')


def inherited():
  """A run that begins with the state of another run."""
  return _config('impala')


def two_processes():
  """A run of two processes."""
  config = _config(num_shards=2, num_grad_shards=2)
  config.env.task = 'Catch-v0'
  return config


def get_config(name: str):
  """Returns the config called `name`."""
  return globals()[name]()
