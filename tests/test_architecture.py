"""The structure of the package: imports point down, and public names have docstrings."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

from podracer_jit.losses import ALGORITHMS
from podracer_jit.schemes.table import SCHEMES
from tests import rooms
from tests.rooms import ORDER, PACKAGE, TIER_OF, TIERS, TREES, imported, inside, room

# Third-party packages that each tier may import; None: any.
OUTSIDE = {
    'ground': {'jax', 'numpy'},
    'numerics': {'jax', 'numpy', 'chex'},
    'maths': {'jax', 'numpy', 'chex', 'rlax', 'flax', 'optax'},
    'world': {'jax', 'numpy', 'chex', 'envpool', 'gymnasium', 'gymnax', 'mujoco',
              'mujoco_playground'},
    'operations': {'jax', 'numpy', 'chex', 'flax', 'optax'},
    'plumbing': {'jax', 'numpy', 'absl'},
    'cluster': {'jax', 'numpy', 'absl', 'ray'},
    'schemes': {'jax', 'numpy'},
    'assembly': None,
}


def test_every_module_belongs_to_a_tier():
  assert {room(module) for module in TREES} <= set(TIER_OF)


@pytest.mark.quick
@pytest.mark.parametrize('module', sorted(TREES))
def test_imports_point_down(module):
  tier = TIER_OF[room(module)]
  above = [name for name in inside(TREES[module])
           if ORDER.index(TIER_OF[room(name)]) > ORDER.index(tier)]
  assert not above, f'{module} is {tier}'


@pytest.mark.quick
def test_the_picture_of_the_rooms_is_up_to_date():
  """`python -m tests.rooms` draws it."""
  assert rooms.PICTURE.read_text() == rooms.draw()


def test_all_arrows_of_the_picture_point_down():
  graph = rooms.imports_between_rooms()
  assert set(graph) == set(rooms.PLAN)
  for upper, lowers in graph.items():
    for lower in lowers:
      assert rooms.box_of(upper).bottom < rooms.box_of(lower).top, f'{upper} imports {lower}'


def test_the_picture_leaves_out_only_imports_that_its_arrows_imply():
  graph = {'a': {'b', 'c', 'd'}, 'b': {'c'}, 'c': {'d'}, 'd': set()}
  assert rooms.arrows(graph) == [('a', 'b'), ('b', 'c'), ('c', 'd')]


def test_folders_of_tests_are_those_of_the_package():
  """Each folder also has a test that `scripts/test --quick` runs."""
  for folder in pathlib.Path(__file__).parent.glob('*/__init__.py'):
    assert (PACKAGE / folder.parent.name / '__init__.py').exists()
    texts = [path.read_text() for path in folder.parent.glob('test_*.py')]
    assert any('mark.quick' in text for text in texts), folder.parent.name


def test_imports_have_no_cycles():
  graph = {module: set(inside(tree)) for module, tree in TREES.items()}
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


@pytest.mark.parametrize('module', sorted(TREES))
def test_a_tier_imports_only_its_allowed_packages(module):
  tier = TIER_OF[room(module)]
  tops = {name.split('.')[0] for name in imported(TREES[module])}
  if OUTSIDE[tier] is not None:
    assert tops - set(sys.stdlib_module_names) - {PACKAGE.name} <= OUTSIDE[tier]
  if tier in ('ground', 'numerics', 'maths', 'operations'):
    assert not tops & {'threading', 'time', 'os'}


@pytest.mark.parametrize('module', [m for m in TREES if TIER_OF[room(m)] == 'plumbing'])
def test_plumbing_imports_no_room_of_reinforcement_learning(module):
  allowed = {*TIERS['ground'], *TIERS['plumbing']}
  assert {room(name) for name in inside(TREES[module])} <= allowed


@pytest.mark.parametrize('module', ['loops', 'runtime.channels'])
def test_loops_and_channels_use_no_word_of_reinforcement_learning(module):
  names = {getattr(node, field) for node in ast.walk(TREES[module])
           for field in ('id', 'attr', 'arg', 'name') if isinstance(getattr(node, field, 0), str)}
  words = {word for name in names for word in name.lower().split('_')}
  assert not words & {'actor', 'actors', 'learner', 'learners', 'rollout', 'rollouts', 'reward',
                      'policy', 'action', 'env', 'envs', 'episode', 'params', 'loss', 'gradient'}


def test_only_envs_imports_envpool():
  users = {module for module, tree in TREES.items()
           if any(name.split('.')[0] == 'envpool' for name in imported(tree))}
  assert users == {'envs.envpool_envs'}


def test_only_the_cluster_imports_ray():
  users = {room(module) for module, tree in TREES.items()
           if any(name.split('.')[0] == 'ray' for name in imported(tree))}
  assert users == {'cluster'}


def test_a_run_without_a_cluster_does_not_load_ray():
  script = ('import sys\nfrom podracer_jit.run.commands import train\n'
            'from podracer_jit.run import api, machines, session\n'
            'from podracer_jit import configs\nimport podracer_jit as pj\n'
            'config = pj.load_config("impala_catch")\n'
            'with machines.joined(config.to_dict()) as cluster: assert cluster is None\n'
            'assert "ray" not in sys.modules')
  subprocess.run([sys.executable, '-c', script], check=True)


@pytest.mark.parametrize('module', sorted(m for m in TREES if room(m) == 'cluster'))
def test_the_cluster_knows_nothing_of_reinforcement_learning(module):
  assert {room(name) for name in inside(TREES[module])} <= {
      'cluster', *TIERS['ground'], *TIERS['plumbing']}


def test_only_families_and_run_import_envpool_envs():
  users = {module for module, tree in TREES.items() if 'envs.envpool_envs' in set(inside(tree))}
  assert {module for module in users if room(module) != 'run'} == {'envs.families'}


def test_configs_and_parts_do_not_load_envpool():
  script = ('import sys\nfrom podracer_jit import losses\nfrom podracer_jit.configs import '
            'impala_atari\nimpala_atari.get_config()\nassert "envpool" not in sys.modules')
  subprocess.run([sys.executable, '-c', script], check=True)


def texts(tree):
  """Returns the string constants of a module, with parts of f-strings but without docstrings."""
  expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
          and isinstance(node.value, str) and id(node) not in expressions}


@pytest.mark.parametrize('module', sorted(TREES))
def test_no_other_module_refers_to_an_algorithm_by_name_or_type(module):
  if room(module) in ('losses', 'configs'):
    return
  keys = set(SCHEMES) if module == 'schemes.table' else set()
  assert not texts(TREES[module]) & (set(ALGORITHMS) - keys)
  types = {cls.__name__ for cls in ALGORITHMS.values()}
  assert not {node.id for node in ast.walk(TREES[module]) if isinstance(node, ast.Name)} & types


def looked_up(tree):
  """Yields the string keys that a module looks up in variables called config or fields."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(
        node.slice.value, str):
      owner = node.value
      name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, 'id', '')
      if name in ('config', 'fields'):
        yield node.slice.value


@pytest.mark.parametrize('module', sorted(TREES))
def test_only_resolve_and_its_neighbours_look_up_fields_of_a_config(module):
  """Code after `resolve` has a typed experiment."""
  modules_with_configs = ('run.config', 'run.resolve', 'run.command_line', 'run.checkpoint')
  assert module in modules_with_configs or not list(looked_up(TREES[module]))


@pytest.mark.parametrize('module', sorted(TREES))
def test_everything_public_has_a_docstring(module):
  tree = TREES[module]
  public = [tree]
  for node in tree.body:
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith('_'):
      public.append(node)
    if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
      public += [method for method in node.body if isinstance(method, ast.FunctionDef)
                 and not method.name.startswith('_')]
  unexplained = [getattr(node, 'name', module) for node in public if not ast.get_docstring(node)]
  assert not unexplained
