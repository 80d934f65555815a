"""Films a whole episode: the environment's own pictures, or else its observations."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import imageio_ffmpeg
import jax
import numpy as np

from podracer_jit.actor import rollouts
from podracer_jit.envs.families import family_of
from podracer_jit.envs.protocol import VectorEnv
from podracer_jit.errors import EnvironmentFailed
from podracer_jit.options import shorten
from podracer_jit.parts import user_path
from podracer_jit.play import evaluation
from podracer_jit.workdir import files

SUFFIXES = ('.mp4', '.gif')
TakeFrame = Callable[[rollouts.ActorState], np.ndarray]  # -> frame [H, W, 3] u8


class Film(NamedTuple):
  """Facts about an episode that was filmed."""

  episode_return: float
  frames: int  # one for the first observation, and one for each step
  frame_rate: float
  shown: str  # a phrase about the origin of the pictures


def chosen_path(name: str, video: str | Path, folder: Path) -> Path:
  """Returns the path of a video that an evaluation is asked for.

  Args:
    name: the name of the flag or argument, for the message.
    video: 'mp4' or 'gif' for a file `video` with this suffix in the folder, or a path, relative to
      the current folder, that ends in .mp4 or .gif.
    folder: for 'mp4' and 'gif'.

  Raises:
    ValueError: it is something else.
  """
  if f'.{video}' in SUFFIXES:
    return folder / f'video.{video}'
  if not isinstance(video, str | Path) or Path(video).suffix not in SUFFIXES:
    raise ValueError(f'{name}: must be mp4, gif, or a path that ends in .mp4 or .gif, got '
                     f'{str(video)!r}')
  return user_path(video)


def film(player: evaluation.Player, path: Path, settings: evaluation.Settings,
         check: Callable[[], None] = lambda: None) -> Film:
  """Films an episode: the first one of one environment more than an evaluation has.

  Args:
    player: the policy that plays, and its task.
    path: the path of the video; its suffix is .mp4 or .gif.
    settings: of the evaluation.
    check: called before each step; an error that it raises ends the film, and leaves no file.

  Raises:
    ValueError: the task cannot be rendered, and its observations are no pictures either; or what
      it draws is no picture, or not of one size.
    Failed: the episode is longer than max_steps.
  """
  # Another key than that of the evaluation's own episodes.
  key = jax.random.fold_in(jax.random.key(settings.seed), 1)
  env_seeds = evaluation.seeds(settings.seed, settings.used_envs + 1)[-1:]
  # Each call of the program makes one step, so that a frame can be taken between two steps.
  render_options = getattr(family_of(player.task), 'render_options', {})
  with evaluation.game(player, env_seeds, key, 1, **render_options) as (vector_env, program, state):
    take_frame, shown = _camera(player, vector_env, state)
    first = take_frame(state)
    rate = getattr(vector_env, 'frame_rate', 10.0)
    ended = False
    frames = 1
    with _encoder(path, (first.shape[1], first.shape[0]), rate) as out:
      out.write(first)
      while not ended:
        check()
        state, episodes = program(player.params, state)
        ended, episode_return, length = (x.item() for x in jax.device_get(episodes[:3]))
        evaluation.bound(length, settings.max_steps)
        out.write(take_frame(state))
        frames += 1
  return Film(episode_return, frames, rate, shown)


def _camera(player: evaluation.Player, vector_env: VectorEnv, state: rollouts.ActorState
            ) -> tuple[TakeFrame, str]:
  """Returns a function that takes a frame between two steps, and a phrase about its origin."""
  try:
    first = _rendered(player.task, vector_env, state)
  except _CannotRenderError as error:
    shape = vector_env.first_obs.shape[1:]
    if len(shape) not in (2, 3):
      raise ValueError(f'{error}, and its observations, {shape}, are no pictures') from None
  else:
    return (lambda state: _enlarge(_rendered(player.task, vector_env, state, first.shape)),
            'rendered by the environment')

  channels_last = player.spec.channels_last
  colour = shape[-1 if channels_last else 0] == 3 or player.options.get('gray_scale') is False
  return (lambda state: _enlarge(_picture(np.asarray(state.envs[0].obs)[0], colour,
                                          channels_last)),
          'the observations, since the task cannot be rendered')


class _CannotRenderError(ValueError):
  """Raised if an environment draws nothing, so that a film may show its observations instead."""


def _rendered(task: str, vector_env: VectorEnv, state: rollouts.ActorState,
              shape: tuple[int, ...] | None = None) -> np.ndarray:
  """Returns the picture of an environment of any family, [H, W, 3] u8.

  Args:
    task: name of the task, for error messages.
    vector_env: the environment.
    state: of the actor.
    shape: of the film's first picture; None for the first picture.

  Raises:
    _CannotRenderError: the environment draws nothing.
    ValueError: it returns something else than a picture, or pictures of several sizes.
  """
  cannot = f'no video: {task} cannot be rendered'
  if not hasattr(vector_env, 'render'):
    raise _CannotRenderError(f'{cannot} (it has no function render(state))')
  try:
    returned = vector_env.render(state.envs[0].simulator)
    picture = np.asarray(returned)
  except EnvironmentFailed:
    raise
  except Exception as error:  # noqa: BLE001 - an environment may raise anything
    kind = '' if isinstance(error, RuntimeError) else f'{type(error).__name__}: '
    raise _CannotRenderError(f'{cannot} ({kind}{shorten(str(error))})') from error
  if returned is None:
    raise _CannotRenderError(f'{cannot} (its render() returned None)')
  if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
    raise ValueError(f'no video: render() of {task} returned {picture.dtype} of shape '
                     f'{picture.shape}; a picture must be uint8 of shape (height, width, 3)')
  if shape is not None and picture.shape != shape:
    raise ValueError(f'no video: render() of {task} returned a picture of shape {picture.shape} '
                     f'after one of shape {shape}; all pictures of a film must have one size')
  return picture


def _picture(obs: np.ndarray, colour: bool, channels_last: bool = False) -> np.ndarray:
  """Returns the newest frame of an observation of bytes, or of numbers from 0 to 1, as RGB.

  Args:
    obs: [planes, H, W], [H, W, planes] or [H, W].
    colour: whether the last three planes are one frame in colour.
    channels_last: whether a third axis is the planes.
  """
  if obs.ndim == 3:
    if channels_last:
      obs = obs.transpose(2, 0, 1)
    obs = obs[-3:].transpose(1, 2, 0) if colour else obs[-1]
  if obs.dtype != np.uint8:
    obs = (255 * np.clip(obs, 0, 1)).astype(np.uint8)
  return obs if obs.ndim == 3 else np.repeat(obs[..., None], 3, axis=-1)


def _enlarge(frame: np.ndarray) -> np.ndarray:
  """Enlarges a frame by a whole factor to at least 480 pixels, with even sides for H.264."""
  factor = -(-480 // max(frame.shape[:2]))
  frame = frame.repeat(factor, axis=0).repeat(factor, axis=1)
  height, width, _ = frame.shape
  return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode='edge')


@contextlib.contextmanager
def _encoder(path: Path, size: tuple[int, int], frame_rate: float) -> Iterator[IO[bytes]]:
  """Yields the input of ffmpeg, which takes raw frames; the video is never in memory as a whole.

  The video gets its name once it is whole; after an error there is none, or the old one.

  imageio_ffmpeg's own writer forks and runs Python code in the child, which can deadlock in a
  process with JAX's threads. So ffmpeg is started here.

  Args:
    path: the path of the video.
    size: width and height of a frame, in pixels.
    frame_rate: frames a second.

  Raises:
    OSError: ffmpeg failed; the message has its output.
  """
  source = ['-f', 'rawvideo', '-pix_fmt', 'rgb24', '-s', f'{size[0]}x{size[1]}',
            '-r', f'{frame_rate:.6f}', '-i', '-']
  coding = ['-pix_fmt', 'yuv420p', '-crf', '20', '-movflags', '+faststart']
  if path.suffix == '.gif':
    # A palette for each frame keeps the colours of the game.
    coding = ['-filter_complex', 'split[a][b];[a]palettegen=stats_mode=single[p];'
                                 '[b][p]paletteuse=new=1:dither=none']
  draft = path.with_stem(f'{path.stem}{files.DRAFT}')  # ffmpeg reads the suffix
  command = [imageio_ffmpeg.get_ffmpeg_exe(), '-y', '-loglevel', 'error', *source, *coding,
             f'file:{draft}']
  try:
    # A pipe for its messages could fill up while frames are written, and ffmpeg would wait.
    with (tempfile.TemporaryFile() as messages,
          subprocess.Popen(command, stdin=subprocess.PIPE, stderr=messages) as process):
      try:
        yield process.stdin
      except BrokenPipeError:
        pass  # The exit code and the output, read below, explain the failure.
      except BaseException:
        with contextlib.suppress(OSError):
          process.stdin.close()
        process.kill()
        raise
      process.communicate()
      if process.returncode:
        messages.seek(0)
        text = messages.read().decode(errors='replace').strip()
        raise OSError(f'ffmpeg could not write {path}: {shorten(text, 2000)}')
    os.replace(draft, path)
  finally:
    draft.unlink(missing_ok=True)
