"""Makes a strip of frames, and a video for the page, of a film in a workdir."""

from __future__ import annotations

import base64
import io
import stat
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from podracer_jit.report.reading import VIDEOS, Run

MOST_VIDEO = 1_400_000  # bytes of a video on the page; base64 makes them a third more
_FRAMES = 8
_HEIGHT = 150  # pixels of a frame of the strip
_MOST_FILE = 200_000_000  # bytes; a larger file is not looked at


def of(run: Run) -> Path | None:
  """Returns the newest film of a run, by `evaluate --video` or an evaluation of its training."""
  names = [*VIDEOS, *(record['video'] for record in run.evaluations[::-1]
                      if isinstance(record.get('video'), str))][:len(VIDEOS) + 1]
  films = [run.path / name for name in names]
  return max(filter(lambda film: _is_good(film, run.path.resolve()), films),
             key=lambda film: film.stat().st_mtime, default=None)


def _is_good(film: Path, workdir: Path) -> bool:
  """Returns whether a film is a file in the workdir; a stranger's may name one outside of it."""
  try:
    status = film.stat()
    return (workdir in film.resolve().parents and stat.S_ISREG(status.st_mode)
            and status.st_size <= _MOST_FILE)
  except (OSError, ValueError):
    return False


def data_uri(content: bytes, kind: str) -> str:
  """Returns bytes as the address of an image or a video."""
  return f'data:{kind};base64,{base64.b64encode(content).decode()}'


def strip(film: Path) -> str:
  """Returns some frames of a film, from the first to the last, as the address of one image.

  Raises:
    OSError: the file is no film.
  """
  try:
    frames = _gif(film) if film.suffix == '.gif' else _mp4(film)
    chosen = _spread(frames)
  except Exception as error:  # noqa: BLE001 - decoders raise many types
    raise OSError(f'{film}: cannot be read as a film: {error}') from None
  if not chosen:
    raise OSError(f'{film}: has no frames')
  scale = _HEIGHT / chosen[0].height
  size = (max(1, round(chosen[0].width * scale)), _HEIGHT)
  whole = Image.new('RGB', ((size[0] + 3) * len(chosen) - 3, size[1]), 'white')
  for k, frame in enumerate(chosen):
    whole.paste(frame.resize(size, Image.Resampling.BOX if scale < 1 else
                             Image.Resampling.NEAREST), (k * (size[0] + 3), 0))
  content = io.BytesIO()
  whole.save(content, 'JPEG', quality=82)
  return data_uri(content.getvalue(), 'image/jpeg')


def _spread(frames: Iterable[Image.Image]) -> list[Image.Image]:
  """Returns frames at equal distances; holds few of them at a time."""
  kept: list[Image.Image] = []
  every = 1
  for k, frame in enumerate(frames):
    if k % every == 0:
      kept.append(frame.copy())
    if len(kept) > 8 * _FRAMES:
      kept = kept[::2]
      every *= 2
  if len(kept) <= _FRAMES:
    return kept
  return [kept[round(k * (len(kept) - 1) / (_FRAMES - 1))] for k in range(_FRAMES)]


def _gif(film: Path) -> Iterable[Image.Image]:
  with Image.open(film) as image:
    for k in range(getattr(image, 'n_frames', 1)):
      image.seek(k)
      yield image.convert('RGB')


def _mp4(film: Path) -> Iterable[Image.Image]:
  import imageio_ffmpeg  # only needed for films of this kind

  frames = imageio_ffmpeg.read_frames(str(film))
  size = next(frames)['size']
  for frame in frames:
    yield Image.frombytes('RGB', size, frame)
