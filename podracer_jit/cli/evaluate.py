"""Plays whole episodes with the newest checkpoint of a run, and prints statistics of the returns.

  podracer_jit evaluate --workdir=runs/pong
  podracer_jit evaluate --workdir=runs/pong --num_episodes=20 --greedy --video=mp4
  podracer_jit evaluate --workdir=runs/apex --epsilon=0.001
  podracer_jit evaluate --workdir=runs/pong --env.max_episode_steps=5000

The environments have other seeds than in training (of Gymnasium's, one may be equal by chance).
--epsilon is for DQN, PQN, R2D2 and other algorithms whose policy reads action values.
--env.NAME=VALUE changes an option of the run's task. The command prints the mean return, its
standard error and, for Atari, the human-normalised score. If others have published scores of the
task, it prints the one to compare with, of the same algorithm and a similar number of steps if
there is one, with its protocol. It then appends a line with the result, seed, options, versions,
host and time to evaluate.jsonl in the workdir, and writes the newest result, with each episode, to
evaluation.json. A workdir that cannot be written to is no failure.
The run may still be training; JAX_PLATFORMS=cpu then leaves the GPU to it.

Exit code: 0, 1 if playing failed, 2 if it could not start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from podracer_jit import options, task_sets
from podracer_jit.cli import arguments, runs, verb
from podracer_jit.errors import Failed, Refused, refusing
from podracer_jit.experiment import modules
from podracer_jit.experiment.flags import take_env_options
from podracer_jit.options import printable, shorten, shown
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation, video
from podracer_jit.runtime.output import complain
from podracer_jit.workdir import sources


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  with refusing(OSError):
    values = _flags()
    argv, env = take_env_options(argv)
    if not arguments.read_flags(argv, values, __doc__, ['workdir']):
      return 0
    workdir = user_path(values.workdir)
    settings = evaluation.Settings(values.num_episodes, values.num_envs, values.seed,
                                   values.max_steps)
    movie = None
    if values.video is not None:
      movie = video.chosen_path('--video', values.video, workdir)
    agent = runs.agent_of('evaluate', values)
    player = evaluation.with_options(agent.player, agent.experiment, env)
    player = evaluation.exploring(player, values.greedy, values.epsilon)
    note = sources.change_since(workdir, modules.sources(agent.experiment.fields), agent.update)
    if note:
      complain(f'podracer_jit evaluate: {note}')
    if movie:
      try:
        movie.parent.mkdir(parents=True, exist_ok=True)
      except OSError as error:
        raise Refused(f'--video: cannot make {movie.parent}: {error.strerror}') from None
  # A policy without probabilities draws nothing but random actions, so it plays greedily.
  greedy = values.greedy or player.policy.log_prob is None and not values.epsilon
  _evaluate(player, workdir, settings, dict(greedy=greedy, epsilon=values.epsilon,
                                            env=options.to_json(env)))
  algorithm = agent.experiment.fields.get('loss', {}).get('name', '')
  published = task_sets.nearest(player.task, algorithm, player.steps)
  if published:
    print(f'published  {published.words()}', flush=True)
  if movie:
    film = video.film(player, movie, settings)
    print(printable(f'{movie}: an episode of return {film.episode_return:g}, {film.frames} frames '
                    f'at {film.frame_rate:g} a second ({film.shown})'))
  return 0


def _flags() -> flags.FlagValues:
  """Defines the command's flags."""
  values = runs.agent_flags()
  text = dict(flag_values=values)
  flags.DEFINE_integer('num_episodes', 100, 'Whole episodes to count.', **text)
  flags.DEFINE_integer('num_envs', 16, 'Environments; at most one for each episode is used. The '
                       'numbers of their episodes differ by at most one.', **text)
  flags.DEFINE_integer('seed', 1, 'Seed of the environments and the sampled actions. Their '
                       'streams are not those of training.', **text)
  flags.DEFINE_bool('greedy', False, 'Take the most likely action instead of sampling.', **text)
  flags.DEFINE_float('epsilon', 0.0, 'Probability of a random action in place of the greedy one, '
                     'of an algorithm whose policy reads action values, such as DQN.', **text)
  flags.DEFINE_integer('max_steps', 108_000, 'Most steps of an episode; a longer episode is an '
                       'error, since some tasks have no limit of their own.', **text)
  flags.DEFINE_string('video', None, 'Film one more episode. mp4 or gif writes WORKDIR/video.mp4 '
                      'or WORKDIR/video.gif; a path must end in .mp4 or .gif.', **text)
  return values


def _evaluate(player: evaluation.Player, workdir: Path, settings: evaluation.Settings,
              how: Mapping[str, Any]) -> None:
  """Plays, prints and writes the evaluation.

  Args:
    player: the policy that plays, and its task.
    workdir: the workdir of the run.
    settings: what is played.
    how: further facts for the record.
  """
  started = printed = time.monotonic()

  def progress(episodes: int) -> None:
    nonlocal printed
    if time.monotonic() - printed > 10:
      printed = time.monotonic()
      print(f'{episodes} of {settings.num_episodes} episodes after {printed - started:.0f} s',
            file=sys.stderr, flush=True)

  episodes = evaluation.play(player, settings, progress)
  record = evaluation.record_of(
      player, episodes, seed=settings.seed, num_envs=settings.used_envs,
      max_steps=settings.max_steps, num_episodes=settings.num_episodes, **how)
  error = record['statistics'].get('error')
  try:
    if not error:
      print(_summary(record), flush=True)
  finally:  # also if nobody reads what is printed
    _keep(workdir, record)
  if error:
    raise Failed(error)


def _keep(workdir: Path, record: evaluation.Record) -> None:
  """Writes an evaluation into the workdir, or says which file cannot be written."""
  try:
    evaluation.write(workdir, record)
  except OSError as error:
    complain(f'podracer_jit evaluate: cannot write the result to '
             f'{error.filename or workdir}: {error.strerror}')


def _actions(record: evaluation.Record) -> str:
  """Returns a phrase: how actions were chosen."""
  if record['epsilon']:
    return f'epsilon-greedy actions (epsilon = {record["epsilon"]:g})'
  return 'greedy actions' if record['greedy'] else 'sampled actions'


def _summary(record: evaluation.Record) -> str:
  summary = record['statistics']
  error = '-' if summary['standard_error'] is None else f'{summary["standard_error"]:.2f}'
  changes = ''.join(f', env.{shorten(name)} = {shown(value)}'
                    for name, value in options.from_json(record['env']).items())
  lines = [
      f'{shorten(record["task"])} after update {record["update"]:,} ({record["steps"]:,} steps): '
      f'{len(record["returns"])} episodes, {_actions(record)}{changes}',
      f'return  {summary["mean"]:.2f} +- {error} (mean, standard error)  min {summary["min"]:g}  '
      f'median {summary["median"]:g}  max {summary["max"]:g}',
      f'length  {summary["mean_length"]:.1f} (mean)']
  if 'human_normalised' in summary:
    lines.append(f'human-normalised score  {summary["human_normalised"]:.3f}')
  return '\n'.join(lines)
