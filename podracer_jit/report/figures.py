"""Draws figures as SVG with matplotlib, for a page in light and dark, and as files.

A figure is drawn once, in the colours of `LIGHT`. `inline` replaces these by variables of the
page's style sheet, so the same picture is legible on a dark ground.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from podracer_jit.report.comparing import Curve
from podracer_jit.report.statistics import Interval

# Names of variables of the style sheet, and their colours on a light ground. Groups are `g0`, `g1`,
# ...: Okabe and Ito's colours for the colour-blind, darker where they were too light for lines.
LIGHT: Mapping[str, str] = {
    'ink': '#1d2433', 'muted': '#5d6778', 'grid': '#dfe3ea', 'g0': '#0b6bb3', 'g1': '#c4520a',
    'g2': '#0a8a66', 'g3': '#a8478a', 'g4': '#8a6d00', 'g5': '#3a9fd6', 'g6': '#6b4fc4',
    'g7': '#b3343f'}
COLOURS = 8
DASHES = ('-', (0, (5, 1.5)), (0, (1.5, 1.2)))  # for further groups
SMALL = (3.4, 2.25)  # inches, of one of many
LARGE = (4.5, 2.85)
_RC = {'svg.fonttype': 'none', 'svg.hashsalt': 'podracer_jit', 'font.size': 8.5,
       'font.family': 'sans-serif', 'font.sans-serif': ['DejaVu Sans'],
       'text.color': LIGHT['ink'],
       'axes.labelcolor': LIGHT['muted'], 'axes.edgecolor': LIGHT['muted'],
       'xtick.color': LIGHT['muted'], 'ytick.color': LIGHT['muted'], 'grid.color': LIGHT['grid'],
       'axes.linewidth': 0.7, 'xtick.major.width': 0.7, 'xtick.major.size': 3,
       'ytick.major.size': 0, 'lines.solid_capstyle': 'round', 'lines.solid_joinstyle': 'round',
       'path.simplify': True}
_SEED_POINTS = 120  # most points of a faint line


class Line(NamedTuple):
  """The curves of a group."""

  name: str
  index: int  # of the group, which decides its colour
  curve: Curve


def colour_of(index: int) -> str:
  """Returns the name of the colour of a group, a key of `LIGHT`."""
  return f'g{index % COLOURS}'


def _style(index: int) -> dict:
  return dict(color=LIGHT[colour_of(index)], linestyle=DASHES[index // COLOURS % len(DASHES)])


def _new(size: tuple[float, float]) -> tuple[Figure, Axes]:
  figure = Figure(figsize=size)
  FigureCanvasSVG(figure)
  width, height = size
  axes = figure.add_axes((0.5 / width, 0.4 / height, 1 - 0.62 / width, 1 - 0.58 / height))
  axes.patch.set_visible(False)
  figure.patch.set_visible(False)
  for side in ('top', 'right', 'left'):
    axes.spines[side].set_visible(False)
  axes.grid(axis='y', linewidth=0.7)
  axes.set_axisbelow(True)
  return figure, axes


def number(value: float, _position: int | None = None) -> str:
  """Returns a short form of a number on an axis: 1.5M, 20k, 0.25, 1e-7."""
  size = abs(value)
  for unit, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k')):
    if size >= unit * (10 if letter == 'k' else 1):
      return f'{value / unit:.4g}{letter}' if size < 1e13 else f'{value:.0e}'
  return f'{value:.4g}'


def _finish(figure: Figure, axes: Axes, x_label: str, y_label: str = '') -> str:
  axes.xaxis.set_major_locator(MaxNLocator(5))
  axes.yaxis.set_major_locator(MaxNLocator(5))
  axes.xaxis.set_major_formatter(FuncFormatter(number))
  axes.yaxis.set_major_formatter(FuncFormatter(number))
  _label(figure, axes, x_label, y_label)
  return _svg(figure)


def _label(figure: Figure, axes: Axes, x_label: str, y_label: str = '') -> None:
  """Writes labels at fixed places; matplotlib's own take a third of the time of a figure."""
  box = axes.get_position()
  height = figure.get_size_inches()[1]
  figure.text((box.x0 + box.x1) / 2, 0.04 / height, x_label, ha='center', va='bottom',
              color=LIGHT['muted'])
  if y_label:
    figure.text(box.x0, box.y1 + 0.03 / height, y_label, ha='left', va='bottom', fontsize=8,
                color=LIGHT['muted'])


def _svg(figure: Figure) -> str:
  text = io.StringIO()
  with warnings.catch_warnings():
    # The text stays text, so the reader's fonts count, and not those that matplotlib has.
    warnings.filterwarnings('ignore', r'Glyph \d+ ')
    figure.savefig(text, format='svg', metadata={'Date': None, 'Creator': None})
  svg = text.getvalue()
  svg = svg[svg.index('<svg'):]
  svg = re.sub(r'<metadata>.*?</metadata>|<!--.*?-->', '', svg, flags=re.DOTALL)
  svg = _NUMBERS.sub(lambda match: match[1] + _DIGITS.sub(r'\1', match[2]), svg)
  return re.sub(r'\n\s*', '\n', svg)


# Attributes with coordinates, of which a tenth of a point is enough.
_NUMBERS = re.compile(r'( (?:d|x|y|width|height|transform|points)=")([^"]*)')
_DIGITS = re.compile(r'(\d\.\d)\d+')


def _with_style(draw):  # a decorator; the settings of matplotlib of a caller stay as they are
  def drawn(*args, **kwargs) -> str:
    with matplotlib.rc_context(_RC):
      return draw(*args, **kwargs)
  drawn.__doc__ = draw.__doc__
  drawn.__name__ = draw.__name__
  return drawn


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns every n-th point, counted from the end, which is included."""
  every = max(1, -(-len(x) // _SEED_POINTS))
  return x[::-1][::every][::-1], y[::-1][::every][::-1]


@_with_style
def curves(lines: Sequence[Line], x_label: str, y_label: str = '',
           size: tuple[float, float] = SMALL) -> str:
  """Returns a picture of curves: means in bold, their intervals shaded, seeds faint.

  Args:
    lines: the curves of each group.
    x_label: label of the x axis.
    y_label: label above the y axis.
    size: width and height in inches.
  """
  figure, axes = _new(size)
  for line in lines:
    curve = line.curve
    style = _style(line.index)
    for x, y in curve.seeds if len(curve.seeds) > 1 or not len(curve.x) else ():
      axes.plot(*_thin(x, y), linewidth=0.7, alpha=0.35, **style)
    if np.isfinite(curve.low).any():
      axes.fill_between(curve.x, curve.low, curve.high, color=style['color'], alpha=0.16,
                        linewidth=0)
    if len(curve.seeds) == 1:
      axes.plot(*_thin(*curve.seeds[0]), linewidth=1.7, **style)
    else:
      axes.plot(curve.x, curve.mean, linewidth=1.7, marker='o' if len(curve.x) == 1 else None,
                markersize=4, **style)
  axes.set_xlim(left=0)
  axes.margins(y=0.06)
  return _finish(figure, axes, x_label, y_label)


@_with_style
def values(x: np.ndarray, y: np.ndarray, x_label: str, size: tuple[float, float] = SMALL) -> str:
  """Returns a picture of one metric of one run; a logarithmic axis if it spans four decades.

  Args:
    x: where the values are.
    y: the values; those that are not finite leave gaps.
    x_label: label of the x axis.
    size: width and height in inches.
  """
  figure, axes = _new(size)
  x, y = _thin(x, np.where(np.isfinite(y), y, np.nan))
  axes.plot(x, y, linewidth=1.4, marker='o' if np.isfinite(y).sum() < 3 else None, markersize=3,
            color=LIGHT['g0'])
  axes.set_xlim(left=0)
  known = y[np.isfinite(y)]
  spread = len(known) and known.min() > 0 and known.max() / known.min() > 1e4
  if spread:
    axes.set_yscale('log')
    _label(figure, axes, x_label)
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:.0e}'))
    return _svg(figure)
  return _finish(figure, axes, x_label)


@_with_style
def intervals(rows: Sequence[tuple[str, int, Interval]], x_label: str, mark: float | None = None
              ) -> str:
  """Returns a picture of estimates with their intervals, one above the other.

  Args:
    rows: name, index of the group that gives the colour, and estimate of each row.
    x_label: label of the x axis.
    mark: where a vertical line stands, such as 0.5 for a probability.
  """
  height = 0.62 + 0.36 * len(rows)
  figure = Figure(figsize=(SMALL[0], height))
  FigureCanvasSVG(figure)
  axes = figure.add_axes((0.12 / SMALL[0], 0.4 / height, 1 - 0.24 / SMALL[0], 1 - 0.45 / height))
  axes.patch.set_visible(False)
  figure.patch.set_visible(False)
  for side in ('top', 'right', 'left'):
    axes.spines[side].set_visible(False)
  axes.grid(axis='x', linewidth=0.7)
  axes.set_axisbelow(True)
  if mark is not None:
    axes.axvline(mark, color=LIGHT['muted'], linewidth=1, linestyle=(0, (3, 2)))
  for k, (name, index, estimate) in enumerate(rows):
    y = len(rows) - k
    colour = LIGHT[colour_of(index)]
    if estimate.known:
      axes.plot([estimate.low, estimate.high], [y, y], linewidth=6, alpha=0.3, color=colour,
                solid_capstyle='butt')
    axes.plot([estimate.value], [y], marker='o', markersize=5.5, color=colour)
    axes.annotate(name if len(name) <= 46 else f'{name[:45]}...', (0, y), xytext=(0, 5.5),
                  textcoords='offset points', xycoords=('axes fraction', 'data'), fontsize=7.5,
                  color=LIGHT['ink'], va='bottom', annotation_clip=False, parse_math=False)
  axes.set_ylim(0.6, len(rows) + 0.9)
  axes.set_yticks([])
  axes.margins(x=0.08)
  axes.xaxis.set_major_locator(MaxNLocator(5))
  axes.xaxis.set_major_formatter(FuncFormatter(number))
  _label(figure, axes, x_label)
  return _svg(figure)


@_with_style
def profiles(thresholds: np.ndarray, shares: Sequence[tuple[int, tuple[np.ndarray, ...]]],
             size: tuple[float, float] = LARGE) -> str:
  """Returns a picture of performance profiles.

  Args:
    thresholds: scores, [points].
    shares: index of the group, and share, lower and upper bound, each [points].
    size: width and height in inches.
  """
  figure, axes = _new(size)
  for index, (share, low, high) in shares:
    style = _style(index)
    axes.fill_between(thresholds, low, high, color=style['color'], alpha=0.16, linewidth=0)
    axes.plot(thresholds, share, linewidth=1.7, **style)
  axes.set_xlim(thresholds[0], thresholds[-1])
  axes.set_ylim(0, 1.02)
  return _finish(figure, axes, 'normalised score', 'share of runs with a higher score')


_IDS = re.compile(r'(\bid="|url\(#|href="#)([^")]+)')
_FONT = re.compile(r"font: (?:\w+ )?([\d.]+)px [^;\"]+")
_NAMES = {colour: name for name, colour in LIGHT.items()}


def inline(svg: str, number_on_page: int, title: str) -> str:
  """Returns an SVG for a page: with its variables for colours, its font, and names of its own.

  Args:
    svg: the picture.
    number_on_page: of the picture; no other picture of the page has it.
    title: what the picture shows, for those who do not see it.
  """
  svg = _IDS.sub(lambda match: f'{match[1]}f{number_on_page}-{match[2]}', svg)
  svg = re.sub(r'#[0-9a-f]{6}', lambda match: (
      f'var(--{_NAMES[match[0]]})' if match[0] in _NAMES else match[0]), svg)
  svg = _FONT.sub(r'font-size: \1px', svg)
  head, rest = svg.split('>', 1)
  head = re.sub(r' (?:width|height|version|xmlns)="[^"]*"', '', head)
  return f'{head} role="img" aria-label={quoteattr(title)}>{rest.strip()}'


def standalone(svg: str, title: str, groups: Sequence[tuple[str, int]] = ()) -> str:
  """Returns an SVG for a file of its own, on white, with a title and a legend.

  Args:
    svg: the picture.
    title: text above the picture.
    groups: name and index of each group; a single one needs no legend.
  """
  left, top, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg)[1].split())
  above = 24
  legend = [*_legend(groups, height + 6)] if len(groups) > 1 else []
  below = 6 + 15 * len(legend)
  box = f'{left:g} {top - above:g} {width:g} {height + above + below:g}'
  svg = re.sub(r'viewBox="[^"]+"', f'viewBox="{box}"', svg, count=1)
  svg = re.sub(r' (?:width|height)="[\d.]+pt"', '', svg, count=2)
  head, rest = svg.split('>', 1)
  return '\n'.join([
      f'{head} width="{width * 1.6:.0f}" height="{(height + above + below) * 1.6:.0f}">',
      f'<rect x="{left:g}" y="{top - above:g}" width="100%" height="100%" fill="white"/>',
      f'<text x="12" y="{top - 8:g}" font-family="sans-serif" font-size="10" '
      f'fill="{LIGHT["ink"]}">{escape(title)}</text>',
      rest.replace('</svg>', '').strip(), *legend, '</svg>', ''])


def _legend(groups: Sequence[tuple[str, int]], y: float) -> Iterator[str]:
  for k, (name, index) in enumerate(groups):
    line = y + 15 * k + 4
    dash = DASHES[index // COLOURS % len(DASHES)]
    dashes = '' if dash == '-' else f' stroke-dasharray="{dash[1][0] * 1.7},{dash[1][1] * 1.7}"'
    yield (f'<g><line x1="14" x2="32" y1="{line:g}" y2="{line:g}" stroke-width="2" '
           f'stroke="{LIGHT[colour_of(index)]}"{dashes}/>'
           f'<text x="38" y="{line + 3:g}" font-family="sans-serif" font-size="8.5" '
           f'fill="{LIGHT["ink"]}">{escape(name)}</text></g>')
