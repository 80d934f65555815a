"""Plays whole episodes with a checkpoint of a run, and computes their statistics."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import numbers
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer_jit import schedules, task_sets
from podracer_jit.actor import faults, rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents.policies import Policy
from podracer_jit.envs.families import family_of, libraries_of
from podracer_jit.envs.protocol import EnvSpec, VectorEnv
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.errors import EnvironmentFailed, Failed
from podracer_jit.experiment import build, schema
from podracer_jit.experiment import resolve as resolve_lib
from podracer_jit.experiment.schema import EnvOptions, Experiment
from podracer_jit.losses.algorithm import Acted, Algorithm, ForActors, problem_of_epsilon
from podracer_jit.numerics import counters
from podracer_jit.numerics.precision import products
from podracer_jit.options import shorten, shown
from podracer_jit.runtime import placement
from podracer_jit.types import TrainState
from podracer_jit.workdir import checkpoints, files, record
from podracer_jit.workdir.workdir import Workdir

NEWEST = 'evaluation.json'  # in a workdir: the newest evaluation by the command
# In a workdir: a line for each evaluation by the command. Those of training have a file of their
# own, evaluations.jsonl, since the run rewrites it.
JOURNAL = 'evaluate.jsonl'
Record = dict[str, Any]  # the contents of evaluation.json
# Fields of a task's spec that a policy does not depend on.
_FREE = ('frame_skip', 'max_episode_steps', 'repeats')
ATTEMPTS = 10  # at reading a checkpoint, since a run that still trains may delete it
CHUNK = 128  # steps of a program call; drawn actions depend on it


class Player(NamedTuple):
  """A policy and the task that it was trained for."""

  spec: EnvSpec  # of the task
  options: Mapping[str, Any]  # the task's options, as in training, except for episodic_life
  algorithm: Algorithm  # that acts
  params: Any  # as `Algorithm.acting` returns them
  device: jax.Device
  threads: int  # threads that step the environments
  update: int  # updates that made the parameters
  steps: int  # valid agent steps that the parameters were learned from
  greedy: bool = False  # takes the most likely action instead of drawing one
  epsilon: float = 0.0  # probability of a random action; see `exploring`

  @property
  def task(self) -> str:
    """Name of the task, `env.task` of the config."""
    return self.spec.task

  @property
  def policy(self) -> Policy:
    """The policy of the algorithm."""
    return self.algorithm.parts.policy

  def act(self, params: Any, obs: jax.Array, carry: Any, is_first: jax.Array,
          key: jax.Array | None) -> Acted:
    """Acts on observations.

    Args:
      params: as `Algorithm.acting` returns them.
      obs: [B, ...], as the network reads them.
      carry: that the last call returned.
      is_first: [B] bool, these rows begin an episode, so their part of the carry is reset.
      key: PRNG key; None: takes the most likely actions.
    """
    def begin(initial, x):
      return jnp.where(is_first.reshape(-1, *(1,) * (x.ndim - 1)), initial, x)
    carry = jax.tree.map(begin, self.algorithm.initial_carry(len(obs)), carry)
    with products(self.algorithm.parts.precision):
      return self.algorithm.act(params, obs, carry, jnp.ones(len(obs), bool), key, None)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The episodes that an evaluation plays."""

  num_episodes: int  # episodes that count
  num_envs: int  # environments that play them; at most one for each episode is used
  seed: int  # of the environments and the drawn actions
  max_steps: int  # most steps of an episode that counts
  index: int = 0  # of the evaluation; each has other seeds

  def __post_init__(self):
    """Checks the values.

    Raises:
      ValueError: one is out of range.
    """
    for name in ('num_episodes', 'num_envs', 'max_steps', 'seed'):
      value = getattr(self, name)
      if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f'{name}: must be a whole number, got {value!r}')
      if name != 'seed' and value < 1:
        raise ValueError(f'{name}: must be at least 1, got {value}')
    if not 0 <= self.seed < 2**31:
      raise ValueError(f'seed: must be from 0 to 2^31 - 1, got {self.seed}')

  @property
  def used_envs(self) -> int:
    """Number of environments that are used."""
    return min(self.num_envs, self.num_episodes)


class Episodes(NamedTuple):
  """The counted episodes, environment by environment."""

  returns: list[float]
  lengths: list[int]


def read_experiment(workdir: Path, allow_modules: Collection[str] = (),
                    update: int | None = None, on_one_device: bool = True) -> Experiment:
  """Returns the experiment of a run.

  Args:
    workdir: the workdir of the run.
    allow_modules: modules of a user's own parts that may be imported if the config names them.
    update: returns the config with which this update was made; None: the newest config.
    on_one_device: places it on one device, which is enough to play.

  Raises:
    ValueError: there is no run, its config is wrong, or its observations have changed.
  """
  folder = Workdir(workdir)
  fields = folder.config(allow_modules, update)
  try:
    experiment = resolve_lib.resolve(schema.on_one_device(fields) if on_one_device else fields)
  except ValueError as error:
    raise ValueError(f'--workdir: config.json of {workdir}: {shorten(str(error), 600)}') from None
  folder.check_layout(experiment)
  return experiment


def restore(workdir: Path, experiment: Experiment, update: int | None = None) -> Player:
  """Returns the policy of a checkpoint of the run in workdir.

  Args:
    workdir: the workdir of the run.
    experiment: the experiment of the run, as `read_experiment` returns it.
    update: the update of the checkpoint; None: the newest whole one.

  Raises:
    ValueError: the checkpoint is missing, broken, or of another experiment.
  """
  run = build.make_run(experiment)
  for attempt in range(ATTEMPTS):
    existing = checkpoints.saved_updates(workdir)
    try:
      state = _state(workdir, run, update)
      break
    except (ValueError, FileNotFoundError) as error:
      # A run that is still training may have replaced the checkpoint while it was read. Orbax also
      # looks at checkpoints that are being deleted, which may no longer be among `existing`.
      changed = checkpoints.saved_updates(workdir) != existing
      if attempt == ATTEMPTS - 1 or not (changed or isinstance(error, FileNotFoundError)):
        raise
  return make_player(run, experiment.algorithm.acting(state), int(state.update),
                     counters.fetch_int(state.steps))


def make_player(run: build.Run, params: Any, update: int, steps: int) -> Player:
  """Returns the player of a run's algorithm with these parameters.

  Args:
    run: the run of the experiment.
    params: as `Algorithm.acting` returns them.
    update: updates that made the parameters.
    steps: valid steps that they were learned from.
  """
  experiment = run.experiment
  options = dict(experiment.env_options)
  if 'episodic_life' in options:
    options['episodic_life'] = False  # The loss of a life must not end an episode.
  device = run.place.actors[0]
  # The values that schedules have after these steps are constants of an evaluation.
  algorithm = experiment.algorithm
  if schedules.scheduled(algorithm):
    algorithm = algorithm.at(counters.of(steps, algorithm.state_shapes.steps))
  return Player(experiment.spec, options, algorithm,
                placement.put_params(params, device), device, run.place.env_threads,
                update, steps)


def with_options(player: Player, experiment: Experiment, options: Mapping[str, Any]) -> Player:
  """Returns the player on its task with other options.

  Args:
    player: the policy, and its task.
    experiment: the experiment that trained the policy.
    options: options of the task by name, checked like `env.NAME` of a config.

  Raises:
    ValueError: the task has no such option, its value is wrong, or the policy cannot play with it.
  """
  if not options:
    return player
  for name in EnvOptions.__dataclass_fields__:
    if name in options:
      raise ValueError(f'env.{name}: cannot be changed here; an evaluation plays the task of the '
                       "run, with the task's own options and num_envs environments of its own")
  changed = resolve_lib.changed(experiment, env=options)
  for name, was in player.spec._asdict().items():
    now = getattr(changed.spec, name)
    if name not in _FREE and was != now:
      given = ', '.join(f'env.{option}' for option in options)
      raise ValueError(f'{given}: the policy was trained with {name} = {shown(was)} of '
                       f'{player.task}, which would be {shown(now)}')
  changes = {name: changed.env_options[name] for name in options}
  return player._replace(spec=changed.spec, options=dict(player.options) | changes)


def exploring(player: Player, greedy: bool, epsilon: float) -> Player:
  """Returns the player that draws its actions in another way.

  Args:
    player: the policy, and its task.
    greedy: takes the most likely action instead of drawing one.
    epsilon: probability of a random action in place of the greedy one, of an algorithm that
      explores so (`problem_of_epsilon`).

  Raises:
    ValueError: epsilon is out of range, or the algorithm has none.
  """
  if not isinstance(epsilon, numbers.Real) or not 0 <= epsilon <= 1:
    raise ValueError(f'epsilon: must be between 0 and 1, got {epsilon!r}')
  problem = problem_of_epsilon(player.algorithm, greedy, epsilon)
  if problem:
    raise ValueError(f'epsilon: {problem}')
  return player._replace(greedy=greedy, epsilon=epsilon)


def broken_note(workdir: Path, update: int) -> str:
  """Returns a line about broken checkpoints that are newer than the one of `update`, or ''."""
  problems = {newer: checkpoints.problem(workdir, newer)
              for newer in checkpoints.saved_updates(workdir) if newer > update}
  broken = [f'of update {newer:,} ({problem})' for newer, problem in problems.items() if problem]
  return f'cannot use the checkpoint {" and ".join(broken)}; takes update {update:,}' * bool(broken)


def _state(workdir: Path, run: build.Run, update: int | None) -> TrainState:
  """Returns the state in a checkpoint; see `restore`.

  Raises:
    ValueError: the checkpoint is missing, broken, or of another experiment.
  """
  existing = checkpoints.saved_updates(workdir)
  if not existing:
    raise ValueError(f'--workdir: {workdir} has no checkpoint yet; a run saves one every '
                     f'{run.experiment.checkpoint.every_seconds:g} seconds and at its end')
  if update is not None:
    if update not in existing:
      raise ValueError(f'--workdir: {workdir} has no checkpoint of update {update}; it has those '
                       f'of {", ".join(map(str, existing))}')
    damage = checkpoints.problem(workdir, update)
    if damage:
      raise ValueError(f'--workdir: the checkpoint of update {update} in {workdir} is broken: '
                       f'{damage}')
  else:
    update = checkpoints.newest_whole(workdir)
  if update is None:
    raise ValueError(f'--workdir: no checkpoint in {workdir} is whole; of the newest checkpoint, '
                     f'{existing[-1]}, {checkpoints.problem(workdir, existing[-1])}')
  with contextlib.closing(checkpoints.Checkpoints(workdir)) as saved:
    try:
      state, _ = saved.restore(run.initial_state(), update, files_checked=True)
    except Exception as error:  # noqa: BLE001 - Orbax has no type for unexpected contents
      raise ValueError(f'--workdir: cannot read the checkpoint of update {update} in {workdir}: '
                       f'{shorten(str(error))}') from error
  return state


def seeds(seed: int, num_envs: int, index: int = 0) -> list[int]:
  """Returns seeds of environments for evaluation `index`; they are negative, unlike in training.

  They begin at -2, because the Arcade Learning Environment takes -1 to mean the time of day.
  Gymnasium takes no negative seeds, so `gymnasium_worker.seeds_of` replaces them.
  """
  return [max(-2 - s, -2**31) for s in env_seeds(seed, index, 0, num_envs)]


@contextlib.contextmanager
def game(player: Player, seeds: Sequence[int], key: jax.Array, steps: int,
         **options: Any) -> Iterator[tuple[VectorEnv, Callable, rollouts.ActorState]]:
  """Starts environments and compiles a program that plays them.

  Args:
    player: the policy that plays, and its task.
    seeds: one seed for each environment.
    key: PRNG key of the drawn actions.
    steps: rows of a call of the program.
    **options: options of the task that replace the player's.

  Yields:
    The environments, the program (params, state) -> (state, Episodes [steps, num_envs]), and its
    first state, which is donated.
  """
  vector_env = family_of(player.task).make_vector_env(
      player.task, dict(player.options) | options, seeds, min(player.threads, len(seeds)), 0)
  with contextlib.closing(RolloutProgram([vector_env])) as rollout_program:
    rollout = rollouts.make_rollout(player.algorithm, rollout_program.vector_envs, steps,
                                    greedy=player.greedy)

    def play(params, state):
      state, (experience,) = rollout(ForActors(params), state)
      return state, experience.episodes

    exploration = np.full(len(seeds), player.epsilon, np.float32) if player.epsilon else None
    state = rollouts.initial_state(player.algorithm, [vector_env], [key], exploration=exploration)
    state = jax.device_put(state, player.device)
    yield vector_env, rollout_program.load(play, (player.params, state), donate=(1,)), state


def play(player: Player, settings: Settings,
         progress: Callable[[int], None] = lambda count: None) -> Episodes:
  """Plays whole episodes.

  The number of episodes that count is fixed for each environment before any is played: its first
  num_episodes / num_envs, and one more in the first environments if there is a remainder. Further
  episodes, played while other environments finish, are dropped. If episodes counted in the order in
  which they end, short episodes would be too frequent.

  Args:
    player: the policy that plays, and its task.
    settings: the episodes to play.
    progress: called with the number of episodes counted so far, after each call of the program; an
      exception that it raises ends the evaluation.

  Returns:
    The counted episodes.

  Raises:
    EnvironmentFailed: an environment has returned a value that a policy cannot act on.
    Failed: an episode that counts is longer than max_steps.
  """
  num_envs = settings.used_envs
  each, more = divmod(settings.num_episodes, num_envs)
  quotas = [each + (i < more) for i in range(num_envs)]
  counted: list[list[tuple[float, int]]] = [[] for _ in quotas]  # (return, length), by environment
  key = jax.random.fold_in(jax.random.key(settings.seed), settings.index)
  own_seeds = seeds(settings.seed, num_envs, settings.index)

  with game(player, own_seeds, key, CHUNK) as (_, program, state):
    while any(len(episodes) < quota for episodes, quota in zip(counted, quotas, strict=True)):
      state, played = program(player.params, state)
      played, running = jax.device_get((played, state.envs[0].episode_length))
      fault = faults.describe(played, player.spec)
      if fault is not None:
        env_id, what = fault
        raise EnvironmentFailed(f'{player.task}: {what} (environment {env_id} of the evaluation '
                                f'with seed {settings.seed})')
      for i, episodes in enumerate(counted):
        # Episodes beyond the quota of the environment are dropped.
        rows = np.flatnonzero(played.ended[:, i])[:quotas[i] - len(episodes)]
        for length in played.length[rows, i]:
          bound(int(length), settings.max_steps)
        episodes += [(float(played.episode_return[t, i]), int(played.length[t, i])) for t in rows]
        if len(episodes) < quotas[i]:
          bound(int(running[i]), settings.max_steps)
      progress(sum(map(len, counted)))

  returns, lengths = zip(*[episode for episodes in counted for episode in episodes], strict=True)
  return Episodes(list(returns), list(lengths))


def bound(length: int, max_steps: int) -> None:
  """Refuses to go on with a long episode; many tasks set no limit, so it may never end.

  Raises:
    Failed: the episode is longer than max_steps.
  """
  if length > max_steps:
    raise Failed(f'gave up: {length:,} steps into an episode, and max_steps is {max_steps:,}')


def statistics(task: str, episodes: Episodes) -> dict[str, Any]:
  """Returns statistics of returns and lengths; the standard error of one episode is None.

  JSON cannot hold numbers that are not finite, so these are None, too. If the mean is None, there
  is an 'error', a line that says why.
  """
  returns = np.array(episodes.returns)
  # Returns that are not finite give no warnings, but the error below.
  with np.errstate(invalid='ignore'):
    standard_error = None
    if len(returns) > 1:
      standard_error = float(returns.std(ddof=1) / np.sqrt(len(returns)))
    summary = dict(
        mean=float(returns.mean()), standard_error=standard_error, min=float(returns.min()),
        median=float(np.median(returns)), max=float(returns.max()),
        mean_length=float(np.mean(episodes.lengths)))
    if task in (scores := task_sets.human_scores()):
      random, human = scores[task]
      summary['human_normalised'] = float(np.mean((returns - random) / (human - random)))
  summary = {name: _finite(value) for name, value in summary.items()}
  if summary['mean'] is None:
    wrong = returns[~np.isfinite(returns)]
    summary['error'] = (f'{task}: the returns of {len(wrong)} of {len(returns)} episodes are not '
                        f'finite, such as {wrong[0]}; all rewards must be finite')
  return summary


def _finite(value: float | None) -> float | None:
  return None if value is None or not math.isfinite(value) else value


def record_of(player: Player, episodes: Episodes, **how: Any) -> Record:
  """Returns the record of an evaluation.

  Args:
    player: the policy that played, and its task.
    episodes: the episodes that were played.
    **how: further facts about the evaluation.
  """
  return dict(time=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
              host=platform.node(), task=player.task, update=player.update, steps=player.steps,
              **how, statistics=statistics(player.task, episodes),
              returns=[_finite(episode_return) for episode_return in episodes.returns],
              lengths=episodes.lengths, versions=record.versions(*libraries_of(player.task)))


def write(workdir: Path, record: Record) -> None:
  """Appends an evaluation to evaluate.jsonl, and makes it the content of evaluation.json.

  Other processes may do the same at once. The line does not have the single episodes.

  Args:
    workdir: the workdir of the run.
    record: the evaluation.

  Raises:
    OSError: a file cannot be written.
  """
  # One line for each field, so that a list of returns takes one line.
  fields = (f'{json.dumps(name)}: {json.dumps(value)}' for name, value in record.items())
  line = {name: value for name, value in record.items() if name not in Episodes._fields}
  try:
    files.write(workdir / NEWEST, '{\n' + ',\n'.join(fields) + '\n}\n', is_shared=True)
  finally:  # A file that cannot be written does not keep the result out of the other one.
    files.append_line(workdir / JOURNAL, json.dumps(line))
