"""Options of parts: limits, types and names; and looking up parts by name."""

import collections
import dataclasses
import enum
import importlib
import json
import math
import sys

import flax.linen as nn
import numpy as np
import pytest

from podracer_jit import options, parts
from podracer_jit.agents import networks
from podracer_jit.options import internal, option


@dataclasses.dataclass(frozen=True)
class Part:
  """Has an option of every kind."""

  share: float = option(0.5, 'a share', at_least=0, at_most=1, below=1)
  rate: float = option(0.1, 'a rate', above=0)
  free: float = option(0.0, 'any number')
  count: int = option(3, 'a count', at_least=1)
  index: int = option(0, 'an index', at_least=0, at_most=2**31 - 1)
  on: bool = option(False, 'a switch')
  kind: str = option('a', 'one of three', choices=('a', 'b', 'c'))
  sizes: tuple = option((1, 2), 'sizes', at_least=1, not_empty=True)
  switches: tuple = option((True, False), 'switches')
  hidden: int = internal(7)
  plain: int = 2


def errors_of(**values):
  """Returns the errors of a Part with these values."""
  return list(options.check_values('part.', options.defaults(Part) | values, Part))


def test_options_are_the_fields_that_are_not_internal():
  assert options.defaults(Part) == dict(share=0.5, rate=0.1, free=0.0, count=3, index=0, on=False,
                                        kind='a', sizes=(1, 2), switches=(True, False), plain=2)
  assert options.meanings(Part)['count'].help == 'a count'
  assert errors_of() == []


@pytest.mark.parametrize('values, message', [
    (dict(share=1.5), 'part.share: must be between 0 and 1, got 1.5'),
    (dict(share=0.99999999), 'part.share: must be below 1, got 0.99999999'),
    (dict(share=float('nan')), 'part.share: must be between 0 and 1, got nan'),
    (dict(free=float('inf')), 'part.free: must be finite, got inf'),
    (dict(rate=0.0), 'part.rate: must be above 0, got 0.0'),
    (dict(rate=1e-60), 'part.rate: must be above 0, got 1e-60'),
    (dict(rate='fast'), "part.rate: must be a number, got 'fast'"),
    (dict(count=0), 'part.count: must be at least 1, got 0'),
    (dict(count=2.0), 'part.count: must be a whole number, got 2.0'),
    (dict(count=True), 'part.count: must be a whole number, got True'),
    (dict(index=-1), 'part.index: must not be negative, got -1'),
    (dict(index=2**31), 'part.index: must be below 2^31, got 2147483648'),
    (dict(on=1), 'part.on: must be True or False, got 1'),
    (dict(kind='d'), "part.kind: must be a, b or c, got 'd'"),
    (dict(sizes=(1, 0)), 'part.sizes: must be positive whole numbers, got (1, 0)'),
    (dict(sizes=()), 'part.sizes: must not be empty, got ()'),
    (dict(sizes=3), 'part.sizes: must be positive whole numbers, got 3'),
    (dict(switches=(1,)), 'part.switches: its elements must be True or False, got (1,)'),
    (dict(count=None), 'part.count: has no value yet; set it, for example by --config.part.count='),
])
def test_a_wrong_value_is_reported_in_one_line(values, message):
  assert errors_of(**values) == [message]


def test_a_part_can_be_made_from_json_values():
  part = options.make(Part, options.defaults(Part) | dict(sizes=[4, 5], rate=1))
  assert part.sizes == (4, 5) and isinstance(part.rate, float)


def test_a_flax_modules_own_fields_are_its_options():
  class Torso(nn.Module):
    width: int = 8

  assert options.defaults(Torso) == dict(width=8)
  assert 'chunked' not in options.defaults(networks.NatureCNN)


def test_a_field_without_a_default_is_refused():
  class Torso(nn.Module):
    width: int

  with pytest.raises(ValueError, match='Torso.width has no default'):
    options.meanings(Torso)


def test_unknown_and_missing_names_are_reported():
  defaults = options.defaults(Part)
  values = {name: value for name, value in defaults.items() if name != 'count'} | dict(coutn=3)
  assert list(options.check_names('part.', values, defaults)) == [
      'part.count: is missing',
      'part.coutn: there is no such field; did you mean part.count?']
  assert list(options.check_names('part.', dict(a=1), ['b'], owner='x')) == [
      'part.a: x does not have it; its fields are b', 'part.b: x needs it; its fields are b']


def test_parts_are_found_beside_a_file_and_by_attribute(tmp_path):
  (tmp_path / 'beside_the_config.py').write_text('class Own: pass\n')
  with pytest.raises(ValueError, match="loss.name: cannot import 'beside_the_config'"):
    parts.find('loss.name', 'beside_the_config:Own', {})
  parts.look_beside(tmp_path / 'config.py')
  part = parts.find('loss.name', 'beside_the_config:Own', {})
  assert part is sys.modules['beside_the_config'].Own
  with pytest.raises(ValueError, match="loss.name: beside_the_config has no 'Other'"):
    parts.find('loss.name', 'beside_the_config:Other', {})


@pytest.mark.parametrize('text, value', [
    ('(1, 2)', (1, 2)), ('relu', 'relu'), ('{[]: 1}', '{[]: 1}'), ('1 +', '1 +'),
    ('[' * 10_000, '[' * 10_000)])
def test_a_text_is_a_literal_or_a_text(text, value):
  assert options.literal(text) == value


def test_a_module_that_fails_is_reported_in_one_line(tmp_path):
  (tmp_path / 'fails_at_once.py').write_text('1 / 0\n')
  parts.look_beside(tmp_path / 'config.py')
  with pytest.raises(ValueError, match=r'loss.name: fails_at_once.py fails \(fails_at_once.py, '
                     r'line 1\): ZeroDivisionError'):
    parts.find('loss.name', 'fails_at_once:X', {})
  assert 'fails_at_once' not in sys.modules


@pytest.fixture
def write(tmp_path):
  """Returns a function that writes a file in a folder; modules called own_... are forgotten."""
  def write(name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path

  yield write
  for name in list(sys.modules):
    if name.startswith('own_'):
      del sys.modules[name]


def test_a_module_can_import_the_files_beside_it(write):
  write('own_size.py', 'SIZE = 3\n')
  write('own_near.py', 'from own_size import SIZE as A\n')
  write('own_pkg/__init__.py', '')
  write('own_pkg/size.py', 'SIZE = 4\n')
  write('own_pkg/relative.py', 'from .size import SIZE as A\n')
  write('own_pkg/absolute.py', 'from own_pkg.size import SIZE as A\nimport own_size\n')
  parts.look_beside(write('config.py', ''))
  for module, value in (('own_near', 3), ('own_pkg.relative', 4), ('own_pkg.absolute', 4)):
    assert parts.find('env.task', f'{module}:A', {}) == value
  assert set(parts.sources_of('own_near')) == {'own_near.py', 'own_size.py'}
  assert set(parts.sources_of('own_pkg.absolute')) == {
      'own_pkg/__init__.py', 'own_pkg/absolute.py', 'own_pkg/size.py', 'own_size.py'}


def test_files_beside_a_config_do_not_take_the_place_of_other_modules(write):
  for name in ('tabnanny', 'rlax', 'podracer_jit'):  # of Python, installed, our own
    write(f'{name}.py', 'raise RuntimeError\n')
  config = write('random.py', 'import tabnanny, random, rlax, podracer_jit\nX = 1\n')
  module = parts.run_file(config)
  assert module.X == 1 and module.tabnanny.__file__ != str(config.parent / 'tabnanny.py')
  assert module.random is sys.modules['random'] is not module
  with pytest.raises(ValueError, match='loss.name: .*random.py cannot be called random'):
    parts.find('loss.name', 'random:X', {})


def test_modules_beside_a_config_come_before_others_of_the_user(write, tmp_path, monkeypatch):
  for folder in ('path', 'here', 'beside'):
    write(f'{folder}/own_first.py', f'X = {folder!r}\n')
  for folder in ('path', 'here'):
    write(f'{folder}/own_second.py', f'X = {folder!r}\n')
  write('here/own_third.py', 'import own_third_too\nX = "here"\n')
  write('here/own_third_too.py', '')
  monkeypatch.syspath_prepend(tmp_path / 'path')
  monkeypatch.chdir(tmp_path / 'here')
  parts.look_beside(write('beside/config.py', ''))
  where = {'own_first': 'beside', 'own_second': 'path', 'own_third': 'here'}
  for module, folder in where.items():
    assert parts.file_of(module) == str(tmp_path / folder / f'{module}.py')
    assert parts.find('x', f'{module}:X', {}) == folder


def test_the_current_folder_is_searched_for_modules_that_are_named_only(write, monkeypatch):
  monkeypatch.chdir(write('own_tool.py', '').parent)
  with pytest.raises(ImportError):
    importlib.import_module('own_tool')
  parts.find('x', 'own_tool:__name__', {})


OWN_AND_IMPORTED = '''
import collections, functools, os, random
from os import system
from random import Random, random as draw
from subprocess import Popen
import jax, numpy as np
from own_pkg.other import Near, near
from podracer_jit.schemes.scheme import Scheme
from podracer_jit.schemes.table import SCHEMES

class Own:
  def __call__(self): pass

  def method(self): pass

def own(): pass

lambda_ = lambda: None
instance = Own()
method = Own().method
partial = functools.partial(functools.partial(own))
jitted = jax.jit(own)
cached = functools.lru_cache(own)
scheme = next(iter(SCHEMES.values()))
Pair = collections.namedtuple('Pair', 'a b')

run = functools.partial(os.system)
run_jitted = jax.jit(system)
static = staticmethod(system)

class Wrapper:  # as libraries have them: what it wraps is an attribute of its class
  def __call__(self, *args): return self.__wrapped__(*args)

  __wrapped__ = property(lambda self: system)

Wrapper.__module__ = 'library'
wrapper = Wrapper()

@functools.wraps(own)
def wraps_another(): pass

wraps_another.__wrapped__ = system
pop = [1].pop
generator = Random(3)
rules = {'a': 1}
'''


@pytest.mark.parametrize('name', [
    'Own', 'own', 'lambda_', 'instance', 'method', 'partial', 'jitted', 'cached', 'scheme', 'Pair',
    'rules', 'SCHEMES', '__name__'])
def test_a_part_is_of_its_module(name, write):
  write('own_pkg/__init__.py', '')
  write('own_pkg/other.py', 'class Near: pass\ndef near(): pass\n')
  write('own_pkg/mine.py', OWN_AND_IMPORTED)
  parts.look_beside(write('config.py', ''))
  parts.find('x', f'own_pkg.mine:{name}', {})
  write('own_pkg/__init__.py', 'from own_pkg.other import Near\n')
  importlib.reload(sys.modules['own_pkg'])
  parts.find('x', 'own_pkg:Near', {})  # what is inside of a package is the package's


@pytest.mark.parametrize('name', ['__eq__', '__setattr__', '__class__', '__dict__', 'lazy'])
def test_what_every_module_inherits_and_computes_is_no_part_of_it(name, write):
  write('own_lazy.py', 'def __getattr__(name): raise OSError(name)\n')
  parts.look_beside(write('config.py', ''))
  with pytest.raises(ValueError, match=f"x: own_lazy has no '{name}'"):
    parts.find('x', f'own_lazy:{name}', {})


@pytest.mark.parametrize('name, origin', [
    ('os', 'os'), ('system', 'posix.system'), ('draw', 'None.Random.random'),
    ('Popen', 'subprocess.Popen'), ('run', 'posix.system'), ('run_jitted', 'posix.system'),
    ('pop', 'None.list.pop'), ('generator', 'an instance of random.Random'),
    ('np', 'numpy'), ('Scheme', 'podracer_jit.schemes.scheme.Scheme'),
    ('Near', 'own_pkg.other.Near'), ('near', 'own_pkg.other.near'),
    ('static', 'posix.system'), ('wrapper', 'an instance of library.Wrapper'),
    ('wraps_another', 'posix.system'),
    ('__loader__', 'an instance of _frozen_importlib_external.SourceFileLoader')])
def test_what_a_module_only_imports_is_no_part_of_it(name, origin, write):
  write('own_pkg/__init__.py', '')
  write('own_pkg/other.py', 'class Near: pass\ndef near(): pass\n')
  write('own_pkg/mine.py', OWN_AND_IMPORTED)
  parts.look_beside(write('config.py', ''))
  message = rf"x: 'own_pkg.mine:{name}' leads to {origin}, which own_pkg.mine does not define; must"
  with pytest.raises(ValueError, match=message) as refused:
    parts.find('x', f'own_pkg.mine:{name}', {})
  assert '\n' not in str(refused.value)


@pytest.mark.parametrize('name', [
    'optax:adamw', 'flax.linen:Dense', 'jax:jit',
    'gymnasium.envs.classic_control:CartPoleEnv', 'gymnasium:make'])
def test_names_that_a_library_exports_are_its_parts(name):
  parts.find('x', name, {})


def test_two_folders_cannot_have_helpers_of_one_name(write):
  write('a/own_helper.py', 'X = 1\n')
  write('b/own_helper.py', 'X = 2\n')
  text = 'from own_helper import X\n'
  assert parts.run_file(write('a/own_a.py', text)).X == 1
  with pytest.raises(ImportError, match='own_helper is .*a/own_helper.py in this process, and not'):
    parts.run_file(write('b/own_b.py', text))


@pytest.mark.parametrize('name', ['own_v1.2', 'own-cart', 'own 1 ✓'])
def test_a_file_can_have_parts_whatever_its_name(name, write):
  path = write(f'{name}.py', 'import own_helper\nX = __name__\n')
  write('own_helper.py', '')
  parts.run_file(path)
  assert parts.find('x', f'{name}:X', {}) == name
  del sys.modules[name]  # as in a worker
  assert parts.find('x', f'{name}:X', {}) == name and parts.file_of(name) == str(path)
  assert set(parts.sources_of(name)) == {path.name, 'own_helper.py'}
  with pytest.raises(ValueError, match='must be a name or module:attribute'):
    parts.find('x', f'../{path.parent.name}/{name}:X', {})


class _Colour(enum.IntEnum):
  RED = 1


class _Word(str, enum.Enum):  # noqa: UP042 - as many people have them
  RED = 'red'


@pytest.mark.parametrize('value, plain', [
    (np.float32(0.5), 0.5), (np.float64(0.1), 0.1), (np.int64(3), 3), (np.bool_(True), True),
    (np.array(2), 2), (np.str_('x'), 'x'), (_Colour.RED, 1), (_Word.RED, 'red'), (None, None),
    (True, True), ([np.int8(1), (np.int8(2),)], [1, (2,)]), ({'a': [np.float32(2)]}, {'a': [2.0]}),
    (collections.OrderedDict(a=1), {'a': 1})])
def test_numbers_of_other_libraries_become_pythons(value, plain):
  assert repr(options.plain_value(value)) == repr(plain)


@pytest.mark.parametrize('value', [
    [1, 2], (1, 2), [], (), [(1, [2])], {'x': [5], 'y': (6,), 'z': {'w': [7, (8,)]}}, math.inf,
    math.nan, -0.0, 1.0, 1, True, None, 'x', 10**30])
def test_json_gives_the_same_value_back(value):
  assert not options.problem_of_json(value)
  assert repr(options.from_json(json.loads(json.dumps(options.to_json(value))))) == repr(value)


@pytest.mark.parametrize('value', [
    np.arange(2), len, object, {1: 'a'}, {1, 2}, b'x', 1j, [len], {'a': (b'',)},
    {'__list__': (1,)}])
def test_other_values_are_refused(value):
  assert options.problem_of_json(value).startswith('must consist of numbers, texts')


def test_a_file_cannot_have_the_name_of_another_module(tmp_path):
  (tmp_path / 'json.py').write_text('X = 1\n')
  with pytest.raises(ImportError, match='cannot be called json'):
    parts.load(tmp_path / 'json.py', 'json')
