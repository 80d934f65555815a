"""Checks of the code and the texts that run nothing: python -m tests.lint (scripts/lint)

Each check yields what is wrong, with its place.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from podracer_jit import experiment
from podracer_jit.cli import main as commands
from podracer_jit.losses import ALGORITHMS
from podracer_jit.schemes.table import SCHEMES
from tests import metrics_table, rooms, same_bits
from tests.rooms import ORDER, PACKAGE, ROOT, TIER_OF, TIERS, imported, inside, room

Trees = Mapping[str, ast.Module]  # of the package's modules, by name

# Third-party packages that each tier may import; None: any.
OUTSIDE = {
    'ground': {'jax', 'numpy', 'optax'},
    'numerics': {'jax', 'numpy', 'chex'},
    'maths': {'jax', 'numpy', 'chex', 'rlax', 'flax', 'optax'},
    'world': {'jax', 'numpy', 'chex', 'envpool', 'gymnasium', 'gymnax', 'mujoco',
              'mujoco_playground'},
    'operations': {'jax', 'numpy', 'chex', 'flax', 'optax'},
    'plumbing': {'jax', 'numpy'},
    'cluster': {'jax', 'numpy', 'ray'},
    'schemes': {'jax', 'numpy'},
    'experiment': {'jax', 'numpy', 'flax', 'optax', 'absl', 'ml_collections'},
    'files': {'jax', 'numpy', 'orbax'},
    'runs': None,
    'doors': None,
}
# Who alone may import a package or a module of it: rooms, or modules.
ONLY = {'envpool': {'envs.envpool_envs'}, 'ray': {'cluster'},
        'ml_collections': {'experiment.config_dict', 'experiment.flags', 'api'},
        'absl.flags': {'experiment.flags', 'cli'}}
WORDS_OF_RL = {'actor', 'actors', 'learner', 'learners', 'rollout', 'rollouts', 'reward', 'policy',
               'action', 'env', 'envs', 'episode', 'params', 'loss', 'gradient'}
READ_CONFIGS = {'experiment.schema', 'experiment.resolve', 'experiment.flags'}

# The structure of the package.


def imports(trees: Trees) -> Iterator[str]:
  """Imports point down, without cycles; each room imports only what its tier may."""
  for module, tree in trees.items():
    tier = TIER_OF.get(room(module))
    if tier is None:
      yield f'{module}: tests/rooms.py lists it in no tier'
      continue
    for name in inside(tree):
      if ORDER.index(TIER_OF[room(name)]) > ORDER.index(tier):
        yield f'{module} ({tier}) imports {name}, of a tier above'
      if tier in ('plumbing', 'cluster') and room(name) not in {
          *TIERS['ground'], *TIERS['plumbing'], room(module)}:
        yield f'{module} imports {name}: {tier} knows nothing of reinforcement learning'
      if name == 'envs.envpool_envs' and module != 'envs.families' and room(module) != 'cli':
        yield f'{module} imports {name}; only envs.families and cli may'
    tops = {name.split('.')[0] for name in imported(tree)}
    allowed = OUTSIDE[tier]
    for name in sorted(tops - set(sys.stdlib_module_names) - {PACKAGE.name}):
      if allowed is not None and name not in allowed:
        yield f'{module} ({tier}) imports {name}'
    for name, owners in ONLY.items():
      if not owners & {module, room(module)} and any(
          f'{full}.'.startswith(f'{name}.') for full in imported(tree)):
        yield f'{module} imports {name}; only {", ".join(sorted(owners))} may'
    if tier in ('ground', 'numerics', 'maths', 'operations'):
      yield from (f'{module} ({tier}) imports {name}'
                  for name in sorted(tops & {'threading', 'time', 'os'}))
  try:
    graphlib.TopologicalSorter({module: set(inside(tree)) for module, tree in trees.items()}
                               ).prepare()
  except graphlib.CycleError as error:
    yield f'imports in a cycle: {" -> ".join(error.args[1])}'


def _texts(tree: ast.AST) -> set[str]:
  """Returns the string constants of a module, with parts of f-strings but without docstrings."""
  expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
          and isinstance(node.value, str) and id(node) not in expressions}


def names_of_algorithms(trees: Trees) -> Iterator[str]:
  """Only losses and configs refer to an algorithm, by name or type."""
  types = {cls.__name__ for cls in ALGORITHMS.values()}
  for module, tree in trees.items():
    if room(module) in ('losses', 'configs'):
      continue
    keys = set(SCHEMES) if module == 'schemes.table' else set()
    used = _texts(tree) & (set(ALGORITHMS) - keys)
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & types
    yield from (f'{module} refers to the algorithm {name}' for name in sorted(used))


def parameters(trees: Trees) -> Iterator[str]:
  """Functions of the rooms of a run take five parameters at most; keyword-only ones are free."""
  for module, tree in trees.items():
    if room(module) not in ('experiment', 'workdir', 'play', 'training', 'api', 'cli'):
      continue
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) - (names[:1] in (['self'], ['cls']))
        if count > 5:
          yield f'{module}:{node.lineno}: {node.name} takes {count} parameters'


def words_of_rl(trees: Trees) -> Iterator[str]:
  """Loops and channels use no word of reinforcement learning."""
  for module in ('loops', 'runtime.channels'):
    names = {getattr(node, field) for node in ast.walk(trees[module])
             for field in ('id', 'attr', 'arg', 'name') if isinstance(getattr(node, field, 0), str)}
    words = {word for name in names for word in name.lower().split('_')}
    yield from (f'{module} uses the word {word}' for word in sorted(words & WORDS_OF_RL))


def fields_of_configs(trees: Trees) -> Iterator[str]:
  """Only resolve and its neighbours look up fields; later code has a typed experiment."""
  for module, tree in trees.items():
    for node in ast.walk(tree) if module not in READ_CONFIGS else ():
      if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(
          node.slice.value, str):
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, 'id', '')
        if name in ('config', 'fields'):
          yield f'{module}:{node.lineno} looks up {name}[{node.slice.value!r}]'


def tests_by_room() -> Iterator[str]:
  """Folders of tests are those of the package; each has a test of `scripts/test --quick`."""
  for folder in (ROOT / 'tests').glob('*/__init__.py'):
    name = folder.parent.name
    if name != 'exact' and not (PACKAGE / name / '__init__.py').exists():
      yield f'tests/{name}: the package has no such folder'
    if not any('mark.quick' in path.read_text() for path in folder.parent.glob('test_*.py')):
      yield f'tests/{name}: no test is quick'


# Texts.


def texts() -> list[Path]:
  """Returns the files whose links, names and commands are checked."""
  return [ROOT / 'README.md', ROOT / 'ARCHITECTURE.md', ROOT / 'CHANGELOG.md',
          ROOT / 'CONTRIBUTING.md', ROOT / 'benchmarks' / 'gpu_day' / 'README.md',
          *sorted((ROOT / 'docs').glob('*.md')), *sorted((ROOT / 'docs').glob('[!_]*/*.md')),
          *sorted((PACKAGE / 'configs').glob('[!_]*.py'))]


def sources() -> list[Path]:
  """Returns the files that were written by hand: code, tests, scripts and texts."""
  folders = (PACKAGE, ROOT / 'tests', ROOT / 'benchmarks', ROOT / 'examples', ROOT / 'docs')
  return [*texts(), *(ROOT / 'scripts').iterdir(), ROOT / 'setup.cfg',
          *(path for folder in folders for path in folder.rglob('*.py'))]


def merges(path: Path) -> Iterator[str]:
  """No file has the marks of a merge that somebody must finish."""
  for number, line in enumerate(path.read_text().splitlines(), 1):
    if re.match('(<<<<<<<|>>>>>>>) ', line):
      yield f'{path}:{number}: a merge is not finished'


def links(path: Path) -> Iterator[str]:
  """Links lead to files and headings."""
  for target in re.findall(r'\]\(([^)]+)\)', path.read_text()) if path.suffix == '.md' else ():
    if target.startswith('http'):
      continue
    name, _, anchor = target.partition('#')
    file = path.parent / name if name else path
    if not file.exists():
      yield f'{path}: no file {target}'
    elif anchor:
      headings = re.findall(r'^#+ (.*)', file.read_text(), re.MULTILINE)
      anchors = [re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings]
      if anchor not in anchors:
        yield f'{path}: no heading {target}'


def names(path: Path) -> Iterator[str]:
  """Files, verbs, modules and fields that a text names exist."""
  text = path.read_text()
  named = {
      'file': [f'podracer_jit/{name}' for name in re.findall(r'configs/\w+\.py', text)]
              + re.findall(r'scripts/\w+(?:\.(?:py|sh))?', text)
              + re.findall(r'podracer_jit/[\w/]+\.py', text),
      'verb': re.findall(r'(?:^|`)(?:scripts/train|podracer_jit) ([a-z]\w*)', text, re.MULTILINE),
      'module': re.findall(r'-m (benchmarks\.[\w.]+|tests\.\w+)', text),
      'config': re.findall(r'--config=((?:examples/)?[a-z]\w*(?:\.py)?\b(?!/))', text)}
  for name in named['file']:
    if not (ROOT / name).is_file():
      yield f'{path}: no file {name}'
  for verb in named['verb']:
    if verb not in commands.VERBS:
      yield f'{path}: no verb {verb}'
  for name in named['config']:
    # A path from the root, or the name of a shipped one; mine.py is the reader's.
    path_of = ROOT / name if name.endswith('.py') else PACKAGE / 'configs' / f'{name}.py'
    if name != 'mine.py' and not path_of.is_file():
      yield f'{path}: no config {name}'
  for name in named['module']:
    module = ROOT / name.replace('.', '/')
    if not (module.with_suffix('.py').is_file() or (module / '__main__.py').is_file()):
      yield f'{path}: no module {name}'
  for block in re.findall(r'```sh\n(.*?)```', text, re.DOTALL):
    for command in re.findall(r'^(scripts/\S+)', block, re.MULTILINE):
      if not os.access(ROOT / command, os.X_OK):
        yield f'{path}: {command} cannot be executed'
  known = _fields()
  for field in re.findall(r'--config\.([a-z_.]+)', text):
    # "--config.env.": any option of EnvPool's
    if not field.startswith('env.') and not field.endswith('.') and field not in known:
      yield f'{path}: no field {field}'


def _fields() -> set[str]:
  """Returns the names of all fields of configs, with dots."""
  fields = set()

  def visit(part, prefix=''):
    for key, value in part.items():
      fields.add(prefix + key)
      if isinstance(value, Mapping):
        visit(value, f'{prefix}{key}.')

  for loss, network in (('ppo', 'mlp'), ('ppo', 'nature_cnn'), ('impala', 'mlp'), ('dqn', 'mlp'),
                        ('dpg', 'deterministic')):
    visit(experiment.config(loss, network, 'adam').to_dict())
  return fields


def installations() -> Iterator[str]:
  """No text installs the package by its name, which nobody owns on PyPI; `pip install .` does."""
  tests = ROOT / 'tests'
  for path in sources():
    if tests in path.parents:
      continue
    for line in path.read_text().splitlines():
      if re.search(r'pip install[^;#|]*\bpodracer[-_]jit\b(?![/.])', line):
        yield f'{path}: {line.strip()}'


def islands() -> Iterator[str]:
  """ARCHITECTURE.md explains all islands."""
  text = (ROOT / 'ARCHITECTURE.md').read_text()
  for path in PACKAGE.rglob('*.py'):
    for name in re.findall(r"\bisland\('(\w+)'", path.read_text()):
      if f'`{name}`' not in text:
        yield f'{path}: ARCHITECTURE.md does not explain the island {name}'


def generated() -> Iterator[str]:
  """Pictures and tables that are made from the code are up to date."""
  if rooms.PICTURE.read_text() != rooms.draw():
    yield f'{rooms.PICTURE}: out of date; python -m tests.rooms draws it'
  path = ROOT / 'docs' / 'exactness.md'
  if not all(table in path.read_text() for table in same_bits.tables()):
    yield f'{path}: a table is out of date; python -m tests.same_bits prints them'
  path = ROOT / 'docs' / 'metrics.md'
  if not all(table in path.read_text() for table in metrics_table.tables()):
    yield f'{path}: a table is out of date; python -m tests.metrics_table prints them'


def tests_of_promises() -> Iterator[str]:
  """Each row of docs/robustness.md names tests that exist, in `tests/`."""
  path = ROOT / 'docs' / 'robustness.md'
  table = path.read_text().partition('|---|---|---|\n')[2].partition('\n\n')[0]
  for row in table.splitlines():
    tests = re.findall(r'`((?:\w+/)?test_\w+)`', row.split(' | ')[-1])
    if not tests:
      yield f'{path}: a row without a test: {row}'
    for name in tests:
      if not (ROOT / 'tests' / f'{name}.py').is_file():
        yield f'{path}: no test {name}'


def main() -> int:
  """Prints what is wrong; returns the exit code."""
  trees = rooms.TREES
  complaints = [
      *imports(trees), *names_of_algorithms(trees), *words_of_rl(trees), *fields_of_configs(trees),
      *parameters(trees),
      *tests_by_room(), *installations(), *islands(), *generated(), *tests_of_promises(),
      *(line for path in sources() for line in merges(path)),
      *(line for path in texts() for check in (links, names) for line in check(path))]
  for complaint in complaints:
    print(complaint.replace(f'{ROOT}/', ''))
  return int(bool(complaints))


if __name__ == '__main__':
  sys.exit(main())
