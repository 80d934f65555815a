"""The config: every field with its default, and what some of them mean together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np

from podracer_jit.agents.policies import (
  CONTINUOUS,
  Policy,
  categorical,
  deterministic,
  epsilon_greedy,
)
from podracer_jit.envs import envpool_envs
from podracer_jit.schemes.table import SCHEMES

CORE = dict(core='none', core_size=128)  # none, gru or lstm, between torso and heads
RESNET = dict(channels=(16, 32, 32), blocks=2, hidden=256)
NETWORKS = {
    'impala_resnet': RESNET | CORE,
    'fixup_resnet': RESNET | CORE,
    'nature_cnn': dict(channels=(32, 64, 64), kernels=(8, 4, 3), strides=(4, 2, 1), hidden=512,
                       centre=False) | CORE,
    'mlp': dict(hidden=(64, 64), separate_critic=False) | CORE,
    # A policy that is an action, and its critic: of dpg alone.
    'deterministic': dict(actor_hidden=(300, 200), critic_hidden=(400, 300)),
}
LOSSES = {
    'impala': dict(discount=0.99, vtrace_lambda=1.0, clip_rho=1.0, clip_pg_rho=1.0,
                   baseline_coef=0.5, entropy_coef=0.01),
    'ppo': dict(discount=0.99, gae_lambda=0.95, clip=0.1, clip_value=False, value_coef=0.5,
                entropy_coef=0.01, normalise_advantage=True, vtrace=False),
    # Environment i of N explores with probability epsilon^(1 + epsilon_alpha * i / (N - 1)).
    'dqn': dict(discount=0.99, n_step=3, target_every=2500, epsilon=0.4, epsilon_alpha=7.0),
    # noise: the deviation of what all explore by, of actions between -1 and 1.
    'dpg': dict(discount=0.99, n_step=5, target_every=100, noise=0.3, dqda_clip=1.0),
}
# Of losses that learn from a replay.
REPLAY = dict(
    capacity=2_000_000,  # transitions
    min_size=50_000,  # learning waits for so many
    batch_size=512,
    gradient_steps=1,  # of an update: of apex_lockstep in each round, of apex between two looks
    priority_exponent=0.6,  # 0: uniform
    importance_exponent=0.4,
    eviction='fifo',  # or prioritised: drawn by priority^eviction_exponent
    eviction_exponent=-0.4,
    # Of apex:
    params_every=1,  # rollouts that an actor makes with the same parameters
    samples_per_insert=0.0,  # transitions drawn for each that is added; 0: both as fast as they can
    tolerance=0,  # by how many drawn transitions either side may be ahead of that
)
WITH_REPLAY = ('dqn', 'dpg')
OPTIMIZERS = {
    # RMSProp as PyTorch's: epsilon outside the square root.
    'rmsprop': dict(learning_rate=6e-4, anneal=True, decay=0.99, eps=0.01, max_grad_norm=40.0,
                    kl_target=0.0),
    # kl_target: of PPO, 0 or the divergence that the rate adapts to, between 1e-6 and 1e-2; not
    # with anneal.
    'adam': dict(learning_rate=2.5e-4, anneal=True, b1=0.9, b2=0.999, eps=1e-5,
                 max_grad_norm=0.5, kl_target=0.0),
    # With the epsilon inside the square root, as TensorFlow has it.
    'centred_rmsprop': dict(learning_rate=6.25e-5, anneal=False, decay=0.95, eps=1.5e-7,
                            max_grad_norm=40.0, kl_target=0.0),
}


def config(loss: str, network: str, optimizer: str, **fields: Any) -> ml_collections.ConfigDict:
  """A whole config: the named loss, network and optimizer with all they have, and `fields`.

  A config file goes on to set what makes its experiment; each field can be overridden by a flag.
  """
  whole = dict(
      scheme='cleanba',
      total_steps=50_000_000,  # valid agent steps
      seed=1,
      unroll_length=20,
      num_minibatches=1,
      num_epochs=1,
      num_shards=1,  # pools that the environments are split into, each with its own streams
      # 0: actors wait for all environments; n: for the first n that are ready, and no run repeats.
      env_batch=0,
      num_grad_shards=1,  # groups that a gradient is summed over; the most learner devices
      exact_reduce=True,  # False: a plain all-reduce of one group a device, other bits on each mesh
      microbatch_rows=0,  # network rows to a pass of the gradient; 0: a group's minibatch at once
      env=dict(task='', num_envs=128),  # and any option of EnvPool's, under its own name
      network=dict(name=network, **NETWORKS[network]),
      policy='auto',  # auto: categorical or gaussian, as the task's actions are; or CONTINUOUS
      # By running mean and deviation; value: of PPO, what the network says in deviations.
      normalise=dict(obs=False, reward=False, value=False),
      loss=dict(name=loss, **LOSSES[loss]),
      optimizer=dict(name=optimizer, **OPTIMIZERS[optimizer]),
      placement=dict(
          actor_devices=(0,), learner_devices=(0,), actors_per_device=1,
          env_threads=0,  # EnvPool threads of a pool; 0: the visible cores, shared by the pools
          actor_platform='auto',  # auto, gpu or cpu
          updates_per_call=16,  # of `fused`: updates between two looks from outside
          xla_threads=16),  # of XLA's CPU thread pool; changes bits, so part of the experiment
      # A segment's length; how many to keep; whether with the replay, where there is one: without,
      # every segment begins with an empty one.
      checkpoint=dict(every_updates=1000, keep=3, replay=True),
      log=dict(every_seconds=10.0, window=100, tensorboard=True))
  if loss in WITH_REPLAY:
    whole['replay'] = dict(REPLAY)
  whole.update(fields)
  return ml_collections.ConfigDict(whole)


def batch_rows(config: Mapping[str, Any]) -> int:
  """Rows of one update, invalid ones too."""
  return config['env']['num_envs'] * config['unroll_length']


def env_options(config: Mapping[str, Any]) -> dict[str, Any]:
  """EnvPool's own options among the fields of `env`."""
  return {k: v for k, v in config['env'].items() if k not in ('task', 'num_envs')}


def make_policy(config: Mapping[str, Any], spec: envpool_envs.EnvSpec) -> Policy:
  """The policy that the config asks for, for the actions of the task."""
  if spec.num_actions:
    return (epsilon_greedy if has_replay(config) else categorical)(spec.num_actions)
  kind = 'gaussian' if config['policy'] == 'auto' else config['policy']
  make = deterministic if has_replay(config) else CONTINUOUS[kind]
  return make(np.array(spec.action_low, np.float32), np.array(spec.action_high, np.float32))


def exploration(config: Mapping[str, Any]) -> np.ndarray | None:
  """How much each environment explores, [num_envs] f32: epsilons, or deviations of noise."""
  if not has_replay(config):
    return None
  loss, count = config['loss'], config['env']['num_envs']
  if loss['name'] == 'dpg':
    return np.full(count, loss['noise'], np.float32)
  # 1803.00933, section 4.1
  place = np.arange(count) / max(count - 1, 1)
  return np.power(loss['epsilon'], 1 + loss['epsilon_alpha'] * place).astype(np.float32)


def repeats(config: Mapping[str, Any]) -> bool:
  """Whether the same experiment gives the same bits: nothing is taken as it comes."""
  return SCHEMES[config['scheme']].repeats and not config['env_batch']


def who_repeats_not(config: Mapping[str, Any]) -> str:
  """What it is that takes things as they come, for people."""
  batch = config['env_batch']
  return f'env_batch = {batch}' if batch else config['scheme']


def has_replay(config: Mapping[str, Any]) -> bool:
  """Whether the loss draws from a replay."""
  return config['loss']['name'] in WITH_REPLAY
