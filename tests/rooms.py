"""The rooms of the package and their imports; draws docs/images/rooms.svg.

python -m tests.rooms   # writes the picture; scripts/lint fails if it is out of date

The arrows come from the import statements, and the sentences from the first lines of docstrings.
"""

from __future__ import annotations

import ast
import pathlib
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'podracer_jit'
PICTURE = ROOT / 'docs' / 'images' / 'rooms.svg'

# From the bottom up. A room imports from rooms of its own tier and of the tiers below.
TIERS = {
    'ground': ['errors', 'types', 'schedules', 'options', 'parts', 'metrics', 'task_sets'],
    'numerics': ['numerics'],
    'plumbing': ['runtime', 'loops', 'late'],
    'cluster': ['cluster'],
    'world': ['envs'],
    'maths': ['agents', 'losses', 'replay'],
    'operations': ['learner', 'actor'],
    'schemes': ['schemes'],
    'experiment': ['experiment', 'configs'],
    'files': ['workdir'],
    'runs': ['play', 'training', 'sweep', 'report'],
    'doors': ['api', 'cli', 'testing', '__main__', '__init__'],
}
ORDER = list(TIERS)
TIER_OF = {name: tier for tier, names in TIERS.items() for name in names}


def module_name(path: pathlib.Path) -> str:
  """Returns the name of a file's module: podracer_jit/losses/ppo.py -> losses.ppo"""
  parts = path.relative_to(PACKAGE).with_suffix('').parts
  return '.'.join(parts[:-1] if len(parts) > 1 and parts[-1] == '__init__' else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob('*.py')}


def room(module: str) -> str:
  """Returns the module or folder that TIERS lists for a module."""
  return module.split('.')[0]


def imported(tree: ast.AST) -> Iterator[str]:
  """Yields the full names of everything that a module imports, anywhere in it."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'imports are absolute'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def inside(tree: ast.AST) -> Iterator[str]:
  """Yields the package's own modules that a module imports."""
  for name in imported(tree):
    parts = name.split('.')[1:]
    if name.split('.')[0] == PACKAGE.name:
      yield next('.'.join(parts[:n]) for n in range(len(parts), 0, -1)
                 if '.'.join(parts[:n]) in TREES)


def imports_between_rooms() -> dict[str, set[str]]:
  """Returns for each room the other rooms that it imports."""
  graph: dict[str, set[str]] = {room(module): set() for module in TREES}
  for module, tree in TREES.items():
    graph[room(module)] |= {room(name) for name in inside(tree)} - {room(module)}
  return graph


def arrows(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
  """Returns the imports that no chain of other imports implies, so that the picture stays clear."""
  def below(start: str) -> set[str]:
    reached = set()
    queue = [*graph[start]]
    while queue:
      name = queue.pop()
      if name not in reached:
        reached.add(name)
        queue += graph[name]
    return reached

  return sorted((upper, lower) for upper, lowers in graph.items() for lower in lowers
                if not any(lower in below(sibling) for sibling in lowers - {lower}))


class Box(NamedTuple):
  """A room in the picture, in pixels."""

  left: float
  top: float
  right: float
  bottom: float


# Left and right edge of each room, and its floor, counted from the bottom.
PLAN = {
    'schedules': (20, 980, 0), 'options': (20, 980, 1),
    'metrics': (20, 262, 2), 'parts': (285, 520, 2), 'types': (560, 700, 2),
    'errors': (740, 980, 2),
    'late': (20, 262, 3), 'numerics': (420, 650, 3), 'runtime': (20, 262, 4),
    'envs': (285, 520, 5), 'agents': (285, 700, 6),
    'loops': (20, 226, 7), 'losses': (285, 520, 7), 'cluster': (560, 980, 7),
    'replay': (285, 520, 8), 'learner': (232, 560, 9), 'actor': (600, 980, 9),
    'schemes': (20, 980, 10), 'experiment': (20, 980, 11),
    'task_sets': (20, 190, 12),
    'configs': (220, 340, 12), 'workdir': (370, 980, 12),
    'report': (20, 340, 13), 'play': (370, 980, 13),
    'training': (370, 980, 14), 'testing': (20, 190, 14), 'api': (220, 480, 15),
    'sweep': (520, 980, 15), 'cli': (520, 980, 16),
    '__init__': (20, 480, 16), '__main__': (520, 980, 17),
}
COLOURS = {'ground': '#e8e4da', 'numerics': '#dcebd8', 'plumbing': '#d6e4f2',
           'cluster': '#d6e4f2', 'world': '#f4ead0', 'maths': '#dcebd8', 'operations': '#f6ddd4',
           'schemes': '#d6e4f2', 'experiment': '#e6deef', 'files': '#e8e4da', 'runs': '#e6deef',
           'doors': '#f4ead0'}
WIDTH = 1000
FLOOR = 100  # height of a floor with the gap below it
GAP = 32
TEXT = 15  # height of a line of text
FLOORS = 1 + max(floor for _, _, floor in PLAN.values())
HEIGHT = FLOORS * FLOOR - GAP + 20


def box_of(name: str) -> Box:
  """Returns where a room is in the picture."""
  left, right, floor = PLAN[name]
  top = HEIGHT - 10 - (floor + 1) * FLOOR + GAP
  return Box(left, top, right, top + FLOOR - GAP)


def line_of(upper: str, lower: str, used: list[tuple[float, float, float]]
            ) -> tuple[float, float, float, float]:
  """Returns the ends of an arrow: vertical if there is a free way down between two rooms.

  Args:
    upper: the room that imports.
    lower: the room that is imported.
    used: (x, top, bottom) of the vertical arrows so far; a new one is added.
  """
  a = box_of(upper)
  b = box_of(lower)
  between = [box for box in map(box_of, PLAN) if box.top > a.top and box.bottom < b.bottom]

  def clearance(x: float) -> float:
    """Returns the distance to the nearest obstacle; negative inside a room."""
    edges = [x - a.left, a.right - x, x - b.left, b.right - x]
    edges += [max(box.left - x, x - box.right) for box in between]
    edges += [abs(x - used_x) for used_x, top, bottom in used if top < b.top and bottom > a.bottom]
    return min(edges)

  best = max(range(0, WIDTH, 2), key=clearance)
  if clearance(best) >= 4:
    used.append((best, a.bottom, b.top))
    return best, a.bottom, best, b.top
  # Without a free way down, the arrow goes from the end of one room to the near end of the other.
  start, end = (a.right - 30, b.left + 30) if a.left < b.left else (a.left + 30, b.right - 30)
  return start, a.bottom, end, b.top


def _sentence(name: str) -> str:
  """Returns the first line of the docstring of a room."""
  return (ast.get_docstring(TREES[name]) or '').partition('\n')[0].replace('`', '')


def _shapes_of(name: str) -> Iterator[str]:
  box = box_of(name)
  yield (f'<rect x="{box.left}" y="{box.top}" width="{box.right - box.left}" '
         f'height="{box.bottom - box.top}" rx="6" fill="{COLOURS[TIER_OF[name]]}" '
         'stroke="#555"/>')
  is_folder = (PACKAGE / name).is_dir()
  middle = (box.left + box.right) / 2
  lines = textwrap.wrap(_sentence(name), int((box.right - box.left) / 6.6))
  y = (box.top + box.bottom) / 2 - TEXT * len(lines) / 2 + 5
  yield (f'<text x="{middle}" y="{y}" class="name">'
         f'{escape(name)}{"/" if is_folder else ".py"}</text>')
  for i, line in enumerate(lines, 1):
    yield f'<text x="{middle}" y="{y + TEXT * i}">{escape(line)}</text>'


def draw() -> str:
  """Returns the picture as SVG."""
  lines = [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
      f'height="{HEIGHT}" font-family="sans-serif" font-size="12" text-anchor="middle">',
      '<style>.name { font-weight: bold; font-size: 14px }</style>',
      f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
  used: list[tuple[float, float, float]] = []
  # Short arrows choose their way first.
  for upper, lower in sorted(arrows(imports_between_rooms()),
                             key=lambda pair: PLAN[pair[0]][2] - PLAN[pair[1]][2]):
    x1, y1, x2, y2 = line_of(upper, lower, used)
    lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2 - 8}" stroke="#333" '
                 'stroke-width="1.4"/>')
    lines.append(f'<path d="M{x2 - 4},{y2 - 9} L{x2},{y2 - 1} L{x2 + 4},{y2 - 9} Z" fill="#333"/>')
  for name in PLAN:
    lines += _shapes_of(name)
  return '\n'.join([*lines, '</svg>', ''])


if __name__ == '__main__':
  PICTURE.write_text(draw())
