"""Training, loading and evaluating from Python, without flags: `import podracer_jit as pj`.

What is wrong with an argument, a workdir or the machine is raised as an `errors.Refused`, which is
a ValueError, before anything is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import ml_collections

from podracer_jit.errors import refusing
from podracer_jit.experiment import config_dict, flags, modules, schema
from podracer_jit.experiment.resolve import resolve
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation
from podracer_jit.play import video as video_lib
from podracer_jit.play.agent import PARAMETERS, Agent, load_run, load_saved
from podracer_jit.runtime import host
from podracer_jit.runtime.output import complain
from podracer_jit.training import crew, evaluator, opening, profiling, sinks, stopping, trainer
from podracer_jit.training.sinks import Callback
from podracer_jit.workdir import checkpoints, journal
from podracer_jit.workdir.workdir import make_request

_logger = logging.getLogger(__name__)
_MOST_DEVICES = 16  # that JAX is given for trainings to come
Config: TypeAlias = (
    ml_collections.ConfigDict | ml_collections.FrozenConfigDict | Mapping[str, Any] | str)


def load_config(location: str) -> ml_collections.ConfigDict:
  """Returns the config that --config=LOCATION names, to change and to train.

  Args:
    location: the path of a config file, or the name of a shipped one, with its argument after a
      colon: 'ppo_cartpole', 'mine.py', 'ppo_cartpole:smoke'.

  Raises:
    errors.Refused: there is none, or its file fails.
  """
  with refusing():
    return flags.load_config(location)


@refusing()
def choose(config: ml_collections.ConfigDict, section: str, name: str) -> None:
  """Puts another part into a config, with the part's options and their defaults.

  >>> config = pj.load_config('ppo_cartpole')
  >>> pj.choose(config, 'network', 'simba')
  >>> config.network.hidden
  128

  Args:
    config: the config to change.
    section: 'loss', 'network' or 'optimizer'.
    name: the name of a shipped part, or 'module:Class' of your own.

  Raises:
    errors.Refused: there is no such section or part.
  """
  if section not in schema.CHOICES:
    raise ValueError(f'section: must be one of {", ".join(schema.CHOICES)}, got {section!r}')
  with config.unlocked():
    schema.choose(config, section, name)


@refusing()
def prepare(config: Config) -> None:
  """Makes the settings that JAX reads when it starts; for programs that use JAX before they train.

  `train` does this itself.

  Args:
    config: the config of the run, which decides how many devices JAX gets.

  Raises:
    errors.Refused: JAX has started with other settings, or the placement is wrong.
  """
  # Later trainings in this process may want more devices than this one.
  devices = min(_MOST_DEVICES, len(os.sched_getaffinity(0)))
  experiment = resolve(_mapping(config))
  host.prepare_host(experiment.placement, experiment.numerics.deterministic, devices)


@dataclasses.dataclass(frozen=True)
class Trained:
  """The result of `train`."""

  workdir: Path
  finished: bool  # total_steps are reached, and all evaluations made; False after a stop
  _modules: Collection[str] = dataclasses.field(default=(), repr=False)  # of the user's own parts

  @property
  def update(self) -> int:
    """Updates that are saved; 0 without a checkpoint."""
    return max(checkpoints.saved_updates(self.workdir), default=0)

  @property
  def steps(self) -> int:
    """Valid agent steps learned from."""
    if not self.update:
      return 0
    steps = checkpoints.steps_of(self.workdir, self.update)
    return self.metrics[-1]['steps'] if steps is None else steps

  @functools.cached_property
  def metrics(self) -> list[dict[str, Any]]:
    """The metrics of updates of the run, in order, as in metrics.jsonl."""
    return journal.read_lines(self.workdir / journal.METRICS)

  @functools.cached_property
  def agent(self) -> Agent:
    """The agent of the newest checkpoint."""
    return load(self.workdir, allow_modules=self._modules)


def train(config: Config, workdir: str | Path, *, num_seeds: int | None = None,
          callbacks: Sequence[
              Callback | type[Callback] | Callable[[Mapping[str, Any]], Any] | str] = (),
          init_from: str | Path | None = None,
          init_partly: bool = False, extend: bool = False, change: Sequence[str] = (),
          renew_envs: bool = False, profile_dir: str | Path | None = None,
          quiet: bool = False) -> Trained | list[Trained]:
  """Trains in this process, with the same bits as the command; goes on with a run in the workdir.

  Ctrl-C ends the run at its next update, saves it, and then raises KeyboardInterrupt. The same call
  then goes on with the run. SIGTERM and SIGHUP also end and save the run, and then have their usual
  effect. Before the training begins, and at a second signal, nothing is saved.

  To train with several processes, use `podracer_jit launch`.

  Args:
    config: a whole config, from `load_config` or `config`, or a name for `load_config`.
    workdir: a folder for checkpoints and metrics.
    num_seeds: trains so many seeds at once, from the config's seed on, in one program; each has a
      workdir in the workdir, such as seed1. It is for environments that are JAX functions and a
      scheme that is one program, on one device for each seed. On CPUs a seed has the bits of its
      run alone.
    callbacks: functions, called with the metrics of each update, and instances of `Sink`; also
      subclasses of `Sink`, or 'module:Class', of which each seed gets its own instance.
    init_from: a workdir; a new run begins with the newest state of that run.
    init_partly: parameters and other arrays that do not fit begin anew.
    extend: short for change=['total_steps']: goes on with a larger total_steps.
    change: fields that may differ from the workdir's config.
    renew_envs: goes on with new episodes, if the simulators of the run cannot be made again as
      they were.
    profile_dir: a folder for a jax.profiler trace of a few updates, and a memory profile.
    quiet: prints nothing but warnings.

  Returns:
    The result; its `agent` and `metrics` are read from the workdir on first use. With `num_seeds` a
    list of those of all seeds, in order.

  Raises:
    errors.Refused: the config, the workdir or another argument is wrong; nothing was started.
    OSError: the workdir cannot be written to.
    CallbackFailed: a callback has raised an exception, which is the cause.
    KeyboardInterrupt: Ctrl-C.
    errors.Stuck: the run has failed, or Ctrl-C came twice, and threads, which the message names,
      did not end. They stay until the process ends.
    Exception: the run has failed; the message or a note names the last good checkpoint.
  """
  with refusing():
    told = sinks.users(callbacks, num_seeds or 1)
    fields = _start(config)
    if not isinstance(workdir, str | Path):
      raise ValueError(f'workdir: must be a path, got {workdir!r}')
    folder = user_path(workdir)
    request = make_request(init_from, init_partly, extend, change, renew_envs)
    trace_folder = user_path(profile_dir) if profile_dir else None
    to_record = profiling.make_profiling(trace_folder)

  def enter(stack: contextlib.ExitStack) -> contextlib.AbstractContextManager:
    cluster = None
    if num_seeds is None:
      cluster = stack.enter_context(crew.joined(fields))
    prepare(fields)
    return trainer.opened(resolve(fields), folder, request, cluster, num_seeds)

  opened, finished = _train(enter, quiet, users=told, profiling=to_record)
  if opened is None:
    return Trained(folder, finished=False) if num_seeds is None else []
  results = [_trained(each, finished) for each in opened.runs]
  return results[0] if num_seeds is None else results


def _start(config: Config) -> dict[str, Any]:
  """Returns the config of a training in this process as plain values."""
  if jax.distributed.is_initialized():
    raise ValueError('train: is for one process; podracer_jit launch, or --distributed, starts a '
                     'run of several')
  return _mapping(config)


def _train(enter: Callable[[contextlib.ExitStack], contextlib.AbstractContextManager],
           quiet: bool, **options: Any) -> tuple[Any, bool]:
  """Opens runs and trains them.

  Whenever a signal comes, it has its usual effect once the workdir is closed again.

  Args:
    enter: returns a context of a `trainer.Training`. What it enters in the stack is left after the
      training.
    quiet: prints nothing but warnings.
    **options: of its `train`.

  Returns:
    What was opened, whose workdir is closed again, and whether total_steps are reached. It is None
    if a signal came before it was opened, and the program's own handler has returned.
  """
  began_s = time.perf_counter()
  opened = None
  finished = False
  with stopping.handled(leave=_interrupt, is_command=False) as stop:
    try:
      with contextlib.ExitStack() as stack:
        with refusing():
          opened = stack.enter_context(enter(stack))
        if not quiet:
          for note in opened.notes:
            complain(f'podracer_jit: {note}')
        stop.begin_training()
        finished = opened.train(stop, quiet=quiet, began_s=began_s, **options)
    except KeyboardInterrupt:
      if stop.signal is None:
        raise
  if stop.signal is not None:
    # The program's own handlers are in place again; Python's raises KeyboardInterrupt for Ctrl-C.
    signal.raise_signal(stop.signal)
  return opened, finished


def _trained(opened: opening.Opened, finished: bool) -> Trained:
  names = modules.named(opened.run.experiment.fields).values()
  return Trained(opened.workdir, finished, tuple(names))


@refusing()
def load(path: str | Path, *, update: int | str | None = None, seed: int = 0,
         allow_modules: Collection[str] = ()) -> Agent:
  """Returns the agent of a run, or one that `Agent.save` has written.

  Args:
    path: a workdir, or the folder of a saved agent.
    update: the update of the checkpoint in the workdir; 'best': the checkpoint with the best
      evaluation (`eval.every_updates`); None: the newest whole checkpoint.
    seed: seeds the actions that the agent draws.
    allow_modules: modules, or .py files, of your own parts that may be imported if the config
      there names them. Importing a module runs it.

  Raises:
    errors.Refused: there is no such agent, or its config names modules that are not allowed.
  """
  path = user_path(path)
  allowed = modules.allowed(allow_modules)
  if (path / PARAMETERS).exists():
    if update is not None:
      raise ValueError(f'update: is for workdirs; {path} is a saved agent')
    return load_saved(path, seed, allowed)
  chosen = evaluator.chosen_update(None if update is None else str(update), path)
  agent, note = load_run(path, chosen, seed, allowed)
  if note:
    _logger.warning('%s', note)
  return agent


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Whole episodes of an agent."""

  task: str
  returns: list[float]  # of the episodes
  lengths: list[int]  # in steps
  # Of the returns 'mean', 'standard_error' (None with one episode), 'min', 'median', 'max',
  # 'mean_length', and for Atari 'human_normalised'. If returns are not finite, the mean is None,
  # and there is an 'error'.
  statistics: dict[str, Any]
  video: Path | None = None  # the video that was written


def evaluate(agent: Agent, num_episodes: int = 100, *, num_envs: int = 16, seed: int = 1,
             greedy: bool = False, epsilon: float = 0.0, max_steps: int = 108_000,
             video: str | Path | None = None, env: Mapping[str, Any] | None = None
             ) -> Evaluation:
  """Plays whole episodes; the results, and the video, are those of the verb `evaluate`.

  Nothing but the video is written.

  Args:
    agent: the agent that plays.
    num_episodes: number of episodes to play.
    num_envs: environments of the evaluation; the numbers of their episodes differ by at most one.
    seed: seeds the environments and the drawn actions, whose streams are not those of training. A
      seed of EnvPool or of JAX functions is never one of training; one of Gymnasium may be, by
      chance.
    greedy: takes the most likely action instead of drawing one.
    epsilon: probability of a random action in place of the greedy one, of DQN, PQN, R2D2 and other
      algorithms whose policy reads action values.
    max_steps: most steps of an episode; some tasks have no limit of their own.
    video: films one more episode: a path that ends in .mp4 or .gif, relative to the current folder;
      'mp4' and 'gif' write video.mp4 and video.gif there. Missing folders are made, and an older
      file is replaced.
    env: options of the task that differ from those of the run, such as {'max_episode_steps': 50}.

  Raises:
    errors.Refused: an argument is out of range, the task has no pictures, or no such option.
    OSError: the video cannot be written.
    errors.Failed: an episode is longer than max_steps, or an environment has failed.
  """
  with refusing():
    if not isinstance(agent, Agent):
      raise ValueError(f'agent: must be an Agent, such as pj.load(workdir) returns, got {agent!r}')
    settings = evaluation.Settings(num_episodes, num_envs, seed, max_steps)
    movie = None if video is None else video_lib.chosen_path('video', video, Path())
    player = evaluation.with_options(agent.player, agent.experiment, env or {})
    player = evaluation.exploring(player, greedy, epsilon)
    if movie:
      # Before the evaluation, whose results an error would lose.
      movie.parent.mkdir(parents=True, exist_ok=True)
      video_lib.film(player, movie, settings)
  episodes = evaluation.play(player, settings)
  return Evaluation(agent.task, episodes.returns, episodes.lengths,
                    evaluation.statistics(agent.task, episodes), movie)


def _mapping(config: Config) -> dict[str, Any]:
  """Returns a config as plain values.

  Raises:
    ValueError: it is not a config, or there is no config of that name.
  """
  if isinstance(config, str):
    config = load_config(config)
  if isinstance(config, Mapping | ml_collections.ConfigDict):
    return config_dict.plain(config)
  raise ValueError(f'config: must be a ConfigDict, a mapping or a name, got {config!r}')


def _interrupt() -> None:
  """Handles a signal that comes before there is anything to save."""
  raise KeyboardInterrupt
