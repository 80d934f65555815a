"""Looks into compiled programs: which islands they have, and what arithmetic is in each."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax._src import compiler

from podracer_jit.numerics.islands import PREFIX

# They move numbers and compute none, and where XLA puts them depends on who reads the results.
MOVES = {'parameter', 'get-tuple-element', 'tuple', 'copy', 'bitcast', 'transpose', 'constant'}
CALLED = re.compile(r'(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[\w.-]+)')
NAMES = re.compile(r', (metadata|backend_config|sharding|frontend_attributes)='
                   r'(\{(?:[^{}]|\{[^{}]*\})*\})')


class Instruction(NamedTuple):
  """A line of a computation."""

  name: str
  shape: str
  opcode: str
  operands: str
  attributes: str


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
  """Collects the text of each program that is compiled, or loaded from the cache, inside."""
  texts, real = [], compiler.compile_or_get_cached

  def compile_and_record(*args, **kwargs):
    executable = real(*args, **kwargs)
    texts.extend(module.to_string() for module in executable.hlo_modules())
    return executable

  compiler.compile_or_get_cached = compile_and_record
  try:
    yield texts
  finally:
    compiler.compile_or_get_cached = real


def islands(text: str) -> dict[str, set[str]]:
  """Returns the arithmetic of each island of a program, by the name of the island.

  An island that the program has several times has an entry for each that differs.
  """
  computations = _parse(text)
  bodies = collections.defaultdict(set)
  for lines in computations.values():
    for line in lines:
      if line.opcode != 'conditional':
        continue
      for branch in re.findall(r'%([\w.-]+)', CALLED.search(line.attributes)[2]):
        name = _name(computations, branch)
        if name:
          bodies[name].add(_arithmetic(computations, branch))
  return dict(bodies)


def _name(computations: dict[str, list[Instruction]], branch: str) -> str | None:
  """The island that a branch of a cond is; None of another branch."""
  for line in computations[branch]:
    scopes = re.findall(PREFIX + r'(\w+)', line.attributes)
    if scopes:
      return scopes[-1]
  return None


def _parse(text: str) -> dict[str, list[Instruction]]:
  computations, lines = {}, []
  for line in text.splitlines():
    begins = re.match(r'(?:ENTRY )?%([\w.-]+) \(.*\{$', line)
    if begins:
      lines = computations[begins[1]] = []
    elif re.match(r'  (ROOT )?%[\w.-]+ = ', line):
      lines.append(_instruction(re.sub(r'/\*.*?\*/', '', line)))
  return computations


def _instruction(line: str) -> Instruction:
  name, rest = re.match(r'  (?:ROOT )?%([\w.-]+) = (.*)', line).groups()
  end = _closing(rest) + 1 if rest.startswith('(') else rest.index(' ')
  shape, rest = rest[:end], rest[end:].strip()
  opcode, rest = rest.split('(', 1)
  end = _closing('(' + rest) - 1
  return Instruction(name, shape, opcode, rest[:end], rest[end + 1:])


def _closing(text: str) -> int:
  """Where the parenthesis closes that text begins with."""
  depth = 0
  for i, letter in enumerate(text):
    depth += {'(': 1, ')': -1}.get(letter, 0)
    if depth == 0:
      return i
  raise ValueError(text)


def _arithmetic(computations: dict[str, list[Instruction]], name: str) -> str:
  """The instructions of a computation, and of those it calls, without names and in one order."""
  return '\n'.join(sorted(_formula(computations, line) for line in computations[name]
                          if not _moves(computations, line)))


def _moves(computations: dict[str, list[Instruction]], line: Instruction) -> bool:
  """Whether an instruction computes nothing."""
  if line.opcode != 'fusion':
    return line.opcode in MOVES
  (called,) = re.findall(r'calls=%([\w.-]+)', line.attributes)
  return all(inner.opcode in MOVES for inner in computations[called])


def _formula(computations: dict[str, list[Instruction]], line: Instruction) -> str:
  """An instruction with what it calls; of its operands the shapes."""
  attributes, inner = _called(computations, line)
  # The order in which a loop carries its arrays is no arithmetic.
  shape = '' if line.opcode in ('while', 'call') else line.shape
  return f'{line.opcode} {shape}{attributes} {inner}'


def _called(computations: dict[str, list[Instruction]], line: Instruction) -> tuple[str, list[str]]:
  """The attributes of an instruction without names, and the computations that it calls."""
  attributes = NAMES.sub('', line.attributes)
  names = [name for _, names in CALLED.findall(attributes)
           for name in re.findall(r'%([\w.-]+)', names)]
  return CALLED.sub('', attributes), [_body(computations, name, line.opcode) for name in names]


def _body(computations: dict[str, list[Instruction]], name: str, opcode: str) -> str:
  """A called computation: of a fusion as the expressions it is, of others their instructions.

  Equal expressions have one number, since XLA computes some of them twice.
  """
  if opcode != 'fusion':
    return _arithmetic(computations, name)
  lines = {line.name: line for line in computations[name]}
  numbers: dict[str, int] = {}  # of expressions

  @functools.cache
  def number(name: str) -> int:
    line = lines[name]
    if line.opcode == 'parameter':
      return numbers.setdefault(f'{line.shape} parameter {len(numbers)}', len(numbers))
    attributes, inner = _called(computations, line)
    operands = [f'#{number(operand)}' for operand in re.findall(r'%([\w.-]+)', line.operands)]
    values = ', '.join(operands) or line.operands  # of a constant
    return numbers.setdefault(
        f'{line.shape} {line.opcode}({values}){attributes}{inner}', len(numbers))

  number(computations[name][-1].name)
  return '; '.join(numbers)
