"""Options that belong to no part: training as a whole, environments, checkpoints and logs."""

from __future__ import annotations

import dataclasses

from podracer_jit.options import INT32_MAX, option

MAX_ENVS = 1_000_000


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
  """The top level of the config, without scheme and policy."""

  total_steps: int = option(50_000_000, 'valid agent steps after which training is finished',
                            at_least=1, at_most=INT32_MAX)
  seed: int = option(1, 'seed of all random numbers', at_least=0, at_most=INT32_MAX)
  unroll_length: int = option(20, 'steps of an environment in a rollout', at_least=1,
                             at_most=INT32_MAX)
  num_minibatches: int = option(1, 'minibatches of an epoch', at_least=1, at_most=INT32_MAX)
  num_epochs: int = option(1, 'passes over a round of rollouts', at_least=1, at_most=10_000)
  num_shards: int = option(
      1, 'vector environments that the environments are split into, each with its own random '
      'numbers', at_least=1, at_most=4096)
  env_batch: int = option(
      0, '0: actors wait for all environments; n: for the first n that are ready, so runs cannot '
      'be repeated', at_least=0, at_most=MAX_ENVS)
  num_grad_shards: int = option(
      1, 'groups that a gradient is summed over; also the most learner devices', at_least=1,
      at_most=MAX_ENVS)
  exact_reduce: bool = option(
      True, "True: gradients are added in one fixed order; False: by XLA's all-reduce, with other "
      'bits on each mesh')
  microbatch_rows: int = option(
      0, "most rows in a pass of the network for a gradient; 0: a group's whole minibatch",
      at_least=0, at_most=INT32_MAX)


@dataclasses.dataclass(frozen=True)
class EnvOptions:
  """The section `env`; beside these fields it has any options of the task's own."""

  task: str = option('', "an EnvPool task, 'gymnasium:ID', 'gymnax:TASK', 'playground:TASK', or "
                     "'module:attribute' of your own environments")
  num_envs: int = option(128, 'environments of all actors together', at_least=1,
                        at_most=MAX_ENVS)


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
  """The section `checkpoint`."""

  every_updates: int = option(1000, 'updates of a segment, which ends with a checkpoint',
                              at_least=1, at_most=INT32_MAX)
  keep: int = option(3, 'checkpoints that stay', at_least=1, at_most=1_000_000)
  replay: bool = option(
      True, 'True: checkpoints have the replay; False: every segment begins with an empty replay')


@dataclasses.dataclass(frozen=True)
class EvalOptions:
  """The section `eval`: evaluations while a run trains."""

  every_updates: int = option(
      0, '0: none; n: the first checkpoint after n more updates is evaluated, and the last one',
      at_least=0, at_most=INT32_MAX)
  num_episodes: int = option(20, 'whole episodes of an evaluation', at_least=1, at_most=1_000_000)
  num_envs: int = option(8, 'environments of an evaluation', at_least=1, at_most=MAX_ENVS)
  greedy: bool = option(False, 'take the most likely action instead of drawing one')
  max_steps: int = option(108_000, 'most steps of an episode; a longer episode ends the evaluation',
                         at_least=1, at_most=INT32_MAX)


@dataclasses.dataclass(frozen=True)
class LogOptions:
  """The section `log`."""

  every_seconds: float = option(10.0, 'seconds between two progress lines, without a terminal',
                                above=0, at_most=1e6)
  window: int = option(100, 'episodes over which returns and lengths are averaged', at_least=1,
                      at_most=1_000_000)
  tensorboard: bool = option(True, 'write events for TensorBoard')
