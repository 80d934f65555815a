"""Plays whole episodes with the newest checkpoint of a run, and prints statistics of the returns.

  podracer_jit evaluate --workdir=runs/pong
  podracer_jit evaluate --workdir=runs/pong --num_episodes=20 --greedy --video=mp4
  podracer_jit evaluate --workdir=runs/pong --env.max_episode_steps=5000

The environments have other seeds than in training (of Gymnasium's, one may be equal by chance).
--env.NAME=VALUE changes an option of the run's task. The command prints the mean return, its
standard error and, for Atari, the human-normalised score. It then appends a line with the result,
seed, options, versions, host and time to evaluate.jsonl in the workdir, and writes the newest
result, with each episode, to evaluation.json. A workdir that cannot be written to is no failure.
The run may still be training; JAX_PLATFORMS=cpu then leaves the GPU to it.

Exit code: 0, 1 if playing failed, 2 if it could not start.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from podracer_jit import options
from podracer_jit.envs.protocol import environment_failure
from podracer_jit.experiment import modules
from podracer_jit.experiment.flags import take_env_options
from podracer_jit.options import printable, shorten, shown
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation, video
from podracer_jit.runtime import host
from podracer_jit.runtime.output import complain
from podracer_jit.training import evaluator
from podracer_jit.workdir import sources


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  values = _flags()
  try:
    argv, env = take_env_options(argv)
    arguments = values(argv)
    if values.help:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    movie = _check(values, arguments)
    workdir = user_path(values.workdir)
    allowed = modules.allowed(values.allow_modules)
    update = evaluator.chosen_update(values.update, workdir)
    experiment = evaluation.read_experiment(workdir, allowed, update)
    host.prepare_host(experiment.placement)
    player = evaluation.restore(workdir, experiment, update)
    player = evaluation.with_options(player, experiment, env)
    for note in (evaluation.broken_note(workdir, player.update) if update is None else '',
                 sources.change_since(workdir, modules.sources(experiment.fields), player.update)):
      if note:
        complain(f'podracer_jit evaluate: {note}')
    if movie:
      movie.parent.mkdir(parents=True, exist_ok=True)
  except (ValueError, OSError, flags.Error) as error:
    complain(f'podracer_jit evaluate: {" ".join(str(error).split())}')
    return 2
  try:
    _evaluate(player, workdir, values, env, movie)
  except Exception as error:  # noqa: BLE001 - the one place where a failure becomes a message
    failure = environment_failure(error)
    message = failure or f'{type(error).__name__}: {" ".join(str(error).split())}'
    complain(f'podracer_jit evaluate: {message}')
    return 1
  return 0


def _flags() -> flags.FlagValues:
  """Defines the command's flags; absl's global flags belong to the importing program."""
  values = flags.FlagValues()
  text = dict(flag_values=values)
  flags.DEFINE_string('workdir', None, 'The workdir of the run.', **text)
  flags.DEFINE_string('update', None, 'The checkpoint: its update, or best for the checkpoint with '
                      'the best evaluation during training. Default: the newest whole checkpoint.',
                      **text)
  flags.DEFINE_integer('num_episodes', 100, 'Whole episodes to count.', **text)
  flags.DEFINE_integer('num_envs', 16, 'Environments; at most one for each episode is used. Each '
                       'plays the same number of episodes.', **text)
  flags.DEFINE_integer('seed', 1, 'Seed of the environments and the sampled actions. Their '
                       'streams are not those of training.', **text)
  flags.DEFINE_bool('greedy', False, 'Take the most likely action instead of sampling.', **text)
  flags.DEFINE_integer('max_steps', 108_000, 'Most steps of an episode; a longer episode is an '
                       'error, since some tasks have no limit of their own.', **text)
  flags.DEFINE_string('video', None, 'Film one more episode. mp4 or gif writes WORKDIR/video.mp4 '
                      'or WORKDIR/video.gif; a path must end in .mp4 or .gif.', **text)
  flags.DEFINE_list('allow_modules', [], modules.HELP, **text)
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', **text)
  return values


def _check(values: flags.FlagValues, arguments: Sequence[str]) -> Path | None:
  """Checks the flags and that there are no other arguments; returns the path of the video."""
  if arguments[1:]:
    raise ValueError(f'{arguments[1]}: not a flag; flags begin with --')
  if not values.workdir:
    raise ValueError('--workdir is missing: podracer_jit evaluate --workdir=runs/pong')
  for name in ('num_episodes', 'num_envs', 'max_steps'):
    if values[name].value < 1:
      raise ValueError(f'--{name}: must be at least 1, got {values[name].value}')
  if not 0 <= values.seed < 2**31:
    raise ValueError(f'--seed: must be from 0 to 2^31 - 1, got {values.seed}')
  if values.video is None:
    return None
  return video.chosen_path('--video', values.video, user_path(values.workdir))


def _evaluate(player: evaluation.Player, workdir: Path, values: flags.FlagValues,
              env: Mapping[str, Any], movie: Path | None) -> None:
  """Plays, prints and writes the evaluation, and films an episode.

  Args:
    player: the policy that plays, and its task.
    workdir: the workdir of the run.
    values: the command's flags.
    env: options of the task that the command was given; the player has them.
    movie: the path of the video, or None.
  """
  if values.greedy:
    player = evaluation.greedy(player)
  started = printed = time.monotonic()

  def progress(episodes: int) -> None:
    nonlocal printed
    if time.monotonic() - printed > 10:
      printed = time.monotonic()
      print(f'{episodes} of {values.num_episodes} episodes after {printed - started:.0f} s',
            file=sys.stderr, flush=True)

  num_envs = min(values.num_envs, values.num_episodes)
  # A policy without probabilities draws nothing, so it always plays greedily.
  greedy = values.greedy or player.policy.log_prob is None
  settings = dict(seed=values.seed, greedy=greedy, num_envs=num_envs, max_steps=values.max_steps,
                  num_episodes=values.num_episodes, env=options.to_json(env))
  episodes = evaluation.play(player, values.num_episodes, num_envs, values.seed, values.max_steps,
                             progress)
  record = evaluation.record_of(player, episodes, **settings)
  error = record['statistics'].get('error')
  try:
    if not error:
      print(_summary(record), flush=True)
  finally:  # also if nobody reads what is printed
    _keep(workdir, record)
  if error:
    raise RuntimeError(error)
  if movie:
    # The filmed environment is one more than the environments of the evaluation.
    film = video.film(player, movie, values.seed, num_envs, values.max_steps)
    print(printable(f'{movie}: an episode of return {film.episode_return:g}, {film.frames} frames '
                    f'at {film.frame_rate:g} a second ({film.shown})'))


def _keep(workdir: Path, record: evaluation.Record) -> None:
  """Writes an evaluation into the workdir, or says which file cannot be written."""
  try:
    evaluation.write(workdir, record)
  except OSError as error:
    complain(f'podracer_jit evaluate: cannot write the result to '
             f'{error.filename or workdir}: {error.strerror}')


def _summary(record: evaluation.Record) -> str:
  summary = record['statistics']
  error = '-' if summary['standard_error'] is None else f'{summary["standard_error"]:.2f}'
  changes = ''.join(f', env.{shorten(name)} = {shown(value)}'
                    for name, value in options.from_json(record['env']).items())
  lines = [
      f'{shorten(record["task"])} after update {record["update"]:,} ({record["steps"]:,} steps): '
      f'{len(record["returns"])} episodes, {"greedy" if record["greedy"] else "sampled"} actions'
      f'{changes}',
      f'return  {summary["mean"]:.2f} +- {error} (mean, standard error)  min {summary["min"]:g}  '
      f'median {summary["median"]:g}  max {summary["max"]:g}',
      f'length  {summary["mean_length"]:.1f} (mean)']
  if 'human_normalised' in summary:
    lines.append(f'human-normalised score  {summary["human_normalised"]:.3f}')
  return '\n'.join(lines)
