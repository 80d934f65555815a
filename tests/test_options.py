"""Options of parts: limits, types and names; and looking up parts by name."""

import dataclasses
import sys

import flax.linen as nn
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
  hidden: int = internal(7)
  plain: int = 2


def errors_of(**values):
  """Returns the errors of a Part with these values."""
  return list(options.check_values('part.', options.defaults(Part) | values, Part))


def test_options_are_the_fields_that_are_not_internal():
  assert options.defaults(Part) == dict(share=0.5, rate=0.1, free=0.0, count=3, index=0, on=False,
                                        kind='a', sizes=(1, 2), plain=2)
  assert options.meanings(Part)['count'].help == 'a count'
  assert errors_of() == []


@pytest.mark.parametrize('values, message', [
    (dict(share=1.5), 'part.share: must be between 0 and 1, got 1.5'),
    (dict(share=0.99999999), 'part.share: must be below 1, got 0.99999999'),
    (dict(share=float('nan')), 'part.share: must be between 0 and 1, got nan'),
    (dict(free=float('inf')), 'part.free: must be between -inf and inf, got inf'),
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
  (tmp_path / 'beside_the_config.py').write_text('class Own:\n  class Inner: pass\n')
  with pytest.raises(ValueError, match="loss.name: cannot import 'beside_the_config'"):
    parts.find('loss.name', 'beside_the_config:Own', {})
  parts.look_beside(tmp_path / 'config.py')
  part = parts.find('loss.name', 'beside_the_config:Own.Inner', {})
  assert part is sys.modules['beside_the_config'].Own.Inner
  with pytest.raises(ValueError, match="loss.name: beside_the_config has no 'Other'"):
    parts.find('loss.name', 'beside_the_config:Other', {})


def test_a_module_that_fails_is_reported_in_one_line(tmp_path):
  (tmp_path / 'fails_at_once.py').write_text('1 / 0\n')
  parts.look_beside(tmp_path / 'config.py')
  with pytest.raises(ValueError, match='loss.name: fails_at_once.py fails: ZeroDivisionError'):
    parts.find('loss.name', 'fails_at_once:X', {})
  assert 'fails_at_once' not in sys.modules


def test_a_file_cannot_have_the_name_of_another_module(tmp_path):
  (tmp_path / 'json.py').write_text('X = 1\n')
  with pytest.raises(ImportError, match='cannot be called json'):
    parts.load(tmp_path / 'json.py', 'json')
