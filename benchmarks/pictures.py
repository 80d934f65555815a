"""Draws pictures of the docs: python -m benchmarks.pictures NAME ...

  python -m benchmarks.pictures flow     # docs/images/data_flow.svg
  python -m benchmarks.pictures mujoco   # docs/images/mujoco.svg, from docs/results.csv
  python -m benchmarks.pictures live     # docs/images/live.svg; trains ppo_cartpole
  python -m benchmarks.pictures agent runs/pole runs/before.mp4 runs/after.mp4

The last one writes docs/images/agent.webp: films of a policy before and after training, beside the
learning curve of the run. They are of CartPole:

  podracer_jit --config=ppo_cartpole --workdir=runs/pole
  podracer_jit evaluate --workdir=runs/pole --num_episodes=1 --seed=3 --video=runs/after.mp4
  podracer_jit --config=ppo_cartpole:smoke --config.optimizer.learning_rate=1e-9 \\
      --workdir=runs/untrained
  podracer_jit evaluate --workdir=runs/untrained --num_episodes=1 --seed=3 --video=runs/before.mp4

All pictures have a ground of their own, so they are legible on light and dark pages; SVGs by this
script follow the reader's choice of colours.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks import results

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / 'docs' / 'images'

# Colours on a light and on a dark ground.
COLOURS = {
    'ground': ('#ffffff', '#161b22'), 'text': ('#1d2433', '#e6e9ef'),
    'muted': ('#5d6778', '#9aa4b5'), 'line': ('#8a93a3', '#6b7585'),
    'actor': ('#dcebd8', '#24402a'), 'channel': ('#f4ead0', '#4a3f1c'),
    'learner': ('#f6ddd4', '#54301f'), 'writer': ('#e6deef', '#3a2f4c'),
    'simulator': ('#d6e4f2', '#1f3a54'),
    'ours': ('#2563b0', '#6ea8f0'), 'theirs': ('#b9721f', '#e0a458')}


def _style() -> str:
  """Returns a style sheet with a class for each colour, `fill-NAME` and `stroke-NAME`."""
  def rules(index: int) -> str:
    return ' '.join(f'.fill-{name} {{ fill: {pair[index]} }} '
                    f'.stroke-{name} {{ stroke: {pair[index]} }}'
                    for name, pair in COLOURS.items())

  return f'<style>{rules(0)} @media (prefers-color-scheme: dark) {{ {rules(1)} }}</style>'


def _svg(width: int, height: int, title: str, body: Sequence[str], font: str = 'sans-serif'
         ) -> str:
  """Returns a picture with a ground of its own."""
  return '\n'.join([
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
      f'height="{height}" font-family="{font}" font-size="13" role="img">',
      f'<title>{escape(title)}</title>', _style(),
      f'<rect width="{width}" height="{height}" rx="8" class="fill-ground"/>',
      *body, '</svg>', ''])


def _text(x: float, y: float, text: str, colour: str = 'text', **attributes: Any) -> str:
  """Returns a line of text."""
  rest = ''.join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
  return f'<text x="{x:g}" y="{y:g}" class="fill-{colour}"{rest}>{escape(text)}</text>'


class Box(NamedTuple):
  """A box of the picture of a round, with its place in pixels."""

  left: float
  top: float
  width: float
  height: float
  colour: str
  title: str
  lines: Sequence[str]

  def draw(self) -> list[str]:
    """Returns its shapes: a title, and lines below it."""
    middle = self.left + self.width / 2
    first = self.top + self.height / 2 - 8 * len(self.lines) + 5
    return [f'<rect x="{self.left:g}" y="{self.top:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="6" class="fill-{self.colour} stroke-line"/>',
            _text(middle, first, self.title, text_anchor='middle', font_weight='bold'),
            *(_text(middle, first + 17 * i, line, text_anchor='middle', font_size=12)
              for i, line in enumerate(self.lines, 1))]


def _arrow(*points: tuple[float, float]) -> str:
  """Returns an arrow along points."""
  path = ' L'.join(f'{x:g},{y:g}' for x, y in points)
  return f'<path d="M{path}" class="stroke-text" fill="none" marker-end="url(#tip)"/>'


def flow() -> str:
  """Returns the picture of a round: rollouts, channels, the learner, and parameters back."""
  turns = [Box(46 + 112 * i, 82, 96, 46, 'ground', name, [line]) for i, (name, line) in enumerate(
      [('receive', 'obs, reward'), ('policy', 'actions'), ('send', 'actions'), ('store', 'a row')])]
  boxes = [
      Box(24, 30, 472, 130, 'actor', '', []), *turns,
      Box(24, 214, 472, 44, 'simulator', 'EnvPool: threads step the environments', []),
      Box(540, 60, 150, 66, 'channel', 'rollouts', ['a channel with one slot']),
      Box(734, 30, 242, 130, 'learner', 'learner: one compiled program',
          ['targets, such as advantages', 'epochs x minibatches:', 'gradient of each group,',
           'their sum in one order, a step']),
      Box(540, 203, 150, 66, 'channel', 'parameters', ['a channel with one slot']),
      Box(734, 203, 242, 66, 'writer', 'writer: a thread of its own',
          ['metrics, receipts, checkpoints'])]
  body = ['<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
          'markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 Z" class="fill-text"/></marker>'
          '</defs>']
  for box in boxes:
    body += box.draw()
  body += [
      _text(260, 54, 'actor: lax.fori_loop, one compiled program', text_anchor='middle',
            font_weight='bold'),
      *(_arrow((left.left + left.width, 105), (right.left, 105))
        for left, right in zip(turns, turns[1:], strict=False)),
      _arrow((430, 128), (430, 146), (94, 146), (94, 129)),  # the next turn
      _arrow((318, 128), (318, 213)), _arrow((70, 214), (70, 129)),
      _arrow((496, 93), (539, 93)), _arrow((690, 93), (733, 93)),
      _arrow((760, 160), (760, 182), (715, 182), (715, 236), (691, 236)),
      _arrow((540, 236), (514, 236), (514, 182), (206, 182), (206, 129)),
      _arrow((900, 160), (900, 202))]
  body.append(_text(24, 290, 'Lag 0: the actor waits for the new parameters. Lag 1: it makes the '
                    'next rollout with the ones before, while the learner learns.', 'muted',
                    font_size=12))
  return _svg(1000, 306, 'A round of training', body)


def mujoco() -> str:
  """Returns bars of returns, ours and CleanRL's, from the rows of docs/results.csv.

  Each task has an axis of its own, from 0 to the larger return. CleanRL's are of three seeds.
  """
  number = r'(-?[\d,.]+) ± ([\d,.]+)'
  rows = []
  for row in results.read(results.TABLE):
    published = re.match(number, row.published)
    # Of bars of costs, longer would be worse.
    if row.config == 'ppo_mujoco' and published and row.values.mean() > 0:
      theirs = (float(text.replace(',', '')) for text in published.groups())
      rows.append((row.task, (row.values.mean(), row.values.std(), len(row.values)),
                   (*theirs, 3)))
  body = [_text(20, 26, 'PPO, 1M steps of MuJoCo: mean return and deviation (seeds)',
                font_weight='bold'),
          '<rect x="20" y="38" width="12" height="10" class="fill-ours"/>',
          _text(38, 48, 'podracer_jit', 'muted', font_size=12),
          '<rect x="130" y="38" width="12" height="10" class="fill-theirs"/>',
          _text(148, 48, "CleanRL's published", 'muted', font_size=12)]
  for i, (task, ours, theirs) in enumerate(rows):
    top = 64 + 42 * i
    scale = 260 / max(mean + deviation for mean, deviation, _ in (ours, theirs))
    body.append(_text(150, top + 20, task, text_anchor='end', font_size=12))
    for k, (name, (value, width, seeds)) in enumerate((('ours', ours), ('theirs', theirs))):
      y = top + 16 * k
      end = 160 + scale * value
      body += [f'<rect x="160" y="{y}" width="{scale * value:.1f}" height="13" '
               f'class="fill-{name}"/>',
               f'<path d="M{end - scale * width:.1f},{y + 6.5} h{2 * scale * width:.1f}" '
               'class="stroke-text" stroke-width="1.5"/>',
               _text(432, y + 11, f'{value:,.0f} ± {width:,.0f} ({seeds})', 'muted', font_size=11)]
  return _svg(540, 64 + 42 * len(rows), 'Returns of MuJoCo beside CleanRL', body)


def _curve(workdir: Path, size: tuple[int, int]) -> Any:
  """Returns the learning curve of a run as an image of so many pixels."""
  from matplotlib.figure import Figure
  from PIL import Image
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  points = [(line['steps'], line['episode_return']) for line in lines
            if line.get('episode_return') is not None]
  figure = Figure(figsize=(size[0] / 100, size[1] / 100), dpi=100, layout='constrained')
  axes = figure.add_subplot()
  axes.plot(*zip(*points, strict=True), color=COLOURS['ours'][0], linewidth=1.8)
  axes.set_xlabel('steps of training', fontsize=9)
  axes.set_title('mean return of episodes', fontsize=10, loc='left')
  axes.tick_params(labelsize=8)
  axes.spines[['top', 'right']].set_visible(False)
  axes.xaxis.set_major_formatter(lambda x, _: f'{x / 1e6:g}M' if x else '0')
  file = io.BytesIO()
  figure.savefig(file, format='png')
  return Image.open(file).convert('RGB')


def agent(workdir: Path, before: Path, after: Path, out: Path, seconds: float = 4.0) -> None:
  """Writes an animation: a policy before and after training, and the curve of the training.

  Args:
    workdir: of the run.
    before: a film of the policy before it.
    after: a film of the policy after it.
    out: the file, .webp or .gif.
    seconds: its length.

  Raises:
    OSError: a file cannot be read or written.
  """
  import imageio_ffmpeg
  import numpy as np
  from PIL import Image, ImageDraw, ImageFont
  side, margin, title, frame_rate = 220, 8, 24, 12
  font = ImageFont.load_default(13)

  def frames(path: Path) -> list[Any]:
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about['size']
    step = max(1.0, about['fps'] / frame_rate)
    pictures = [np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in reader]
    chosen = [pictures[int(step * i) % len(pictures)]
              for i in range(int(seconds * frame_rate))]
    return [Image.fromarray(picture).resize((side, side)) for picture in chosen]

  curve = _curve(workdir, (320, side + title))
  films = {'before training': frames(before), 'after training': frames(after)}
  animation = []
  for pair in zip(*films.values(), strict=True):
    canvas = Image.new('RGB', (2 * side + 320 + 4 * margin, side + title + 2 * margin), 'white')
    draw = ImageDraw.Draw(canvas)
    for i, (name, picture) in enumerate(zip(films, pair, strict=True)):
      left = margin + (side + margin) * i
      draw.text((left, margin), name, fill=COLOURS['text'][0], font=font)
      canvas.paste(picture, (left, margin + title))
    canvas.paste(curve, (2 * side + 3 * margin, margin))
    animation.append(canvas)
  animation[0].save(out, save_all=True, append_images=animation[1:], loop=0,
                    duration=1000 // frame_rate, quality=55, method=6)


class _Screen(io.StringIO):
  """A terminal that keeps each block that is shown, with the time."""

  def __init__(self):
    super().__init__()
    self.shown: list[tuple[float, list[str]]] = []

  def write(self, text: str) -> int:
    """Keeps the lines of a block, without the codes that move the cursor and colour it."""
    lines = [line.rstrip() for line in re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', text).splitlines()]
    block = [line.replace('\r', '') for line in lines if line.strip('\r ')]
    if len(block) > 3:
      self.shown.append((time.monotonic(), block))
    return len(text)


def filmed(config: Any, workdir: Path) -> list[tuple[float, list[str]]]:
  """Trains; returns the live blocks that a terminal of 92 columns would show, with seconds.

  Args:
    config: of the training.
    workdir: for it.
  """
  from rich.console import Console

  import podracer_jit as pj
  from podracer_jit.experiment.resolve import resolve
  from podracer_jit.training.progress import Progress

  screen = _Screen()
  console = Console(file=screen, force_terminal=True, color_system=None, width=92)
  experiment = resolve(config)
  pj.train(config, workdir, callbacks=[
      Progress(experiment, f'{experiment.loss_name} on {experiment.env.task}', console)])
  began = screen.shown[0][0]
  return [(at - began, block) for at, block in screen.shown]


def live(shown: Sequence[tuple[float, list[str]]], least_s: float = 0.25) -> str:
  """Returns an animation of live blocks, which shows them at the pace of the training.

  Args:
    shown: the blocks, with seconds.
    least_s: blocks that come sooner after the one before are left out, but for the last one.
  """
  chosen = [shown[0]]
  for at, block in shown[1:]:
    if at - chosen[-1][0] >= least_s or block is shown[-1][1]:
      chosen.append((at, block))
  pause = 3.0  # at the end
  total = chosen[-1][0] + pause
  height = 24 + 19 * max(len(block) for _, block in chosen)
  body = []
  ends = [at for at, _ in chosen[1:]] + [total]
  for (at, block), end in zip(chosen, ends, strict=True):
    rows = ''.join(f'<tspan x="16" y="{26 + 19 * i}">{escape(line)}</tspan>'
                   for i, line in enumerate(block))
    # Readers without animations see the last block.
    shows = 'visible' if end == total else 'hidden'
    times, values = (0, at / total, end / total), ('hidden', 'visible', 'hidden')
    if at == 0:
      times, values = times[1:], values[1:]
    body.append(
        f'<text class="fill-text" xml:space="preserve" visibility="{shows}">{rows}<animate '
        f'attributeName="visibility" values="{";".join(values)}" calcMode="discrete" '
        f'keyTimes="{";".join(f"{x:.4f}" for x in times)}" dur="{total:.2f}s" '
        'repeatCount="indefinite"/></text>')
  return _svg(780, height, 'What a terminal shows while it trains', body, 'monospace')


def main(argv: Sequence[str]) -> int:
  """Draws the picture that is asked for; returns the exit code."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.pictures', description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('name', choices=('flow', 'mujoco', 'live', 'agent'))
  parser.add_argument('paths', nargs='*', type=Path, help='agent: a workdir and two films')
  args = parser.parse_args(argv)
  if (args.name == 'agent') != (len(args.paths) == 3):
    parser.error('agent needs a workdir and two films; the others need nothing')
  if args.name == 'agent':
    agent(*args.paths, IMAGES / 'agent.webp')
  elif args.name == 'live':
    import podracer_jit as pj
    with tempfile.TemporaryDirectory() as folder:
      shown = filmed(pj.load_config('ppo_cartpole'), Path(folder) / 'run')
    (IMAGES / 'live.svg').write_text(live(shown))
  elif args.name == 'flow':
    (IMAGES / 'data_flow.svg').write_text(flow())
  else:
    (IMAGES / 'mujoco.svg').write_text(mujoco())
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
