"""Reads compiled programs (HLO text): the islands of a program and the arithmetic of each."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax._src import compiler

from podracer_jit.numerics.islands import PREFIX
from podracer_jit.runtime.stored_programs import StoredProgram

# These opcodes move numbers without computing any. XLA places them according to the readers of a
# result, so two programs with the same arithmetic may differ in them.
MOVES = {'parameter', 'get-tuple-element', 'tuple', 'copy', 'bitcast', 'transpose', 'constant'}

CALLED = re.compile(
    r'(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)='
    r'(\{[^}]*\}|%[\w.-]+)')
NAMES = re.compile(r', (metadata|backend_config|sharding|frontend_attributes|control-predecessors)='
                   r'(\{(?:[^{}]|\{[^{}]*\})*\})')
# How a TPU runs a kernel; the last attribute.
TPU_CONFIG = re.compile(r', backend_config=(\{"flag_configs".*\})$')
MEMORY = re.compile(r'S\(\d+\)')  # of a TPU, where an array lies; within a shape


class Instruction(NamedTuple):
  """An HLO instruction: one line of a computation."""

  name: str
  shape: str
  opcode: str
  operands: str
  attributes: str


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
  """Collects the HLO text of each program that is compiled or loaded meanwhile."""
  texts = []
  real_compile = compiler.compile_or_get_cached
  real_load = StoredProgram.load

  def compile_and_record(*args, **kwargs):
    executable = real_compile(*args, **kwargs)
    texts.extend(module.to_string() for module in executable.hlo_modules())
    return executable

  def load_and_record(*args, **kwargs):
    program = real_load(*args, **kwargs)
    texts.append(program.as_text())
    return program

  compiler.compile_or_get_cached = compile_and_record
  StoredProgram.load = load_and_record
  try:
    yield texts
  finally:
    compiler.compile_or_get_cached = real_compile
    StoredProgram.load = real_load


def islands(text: str) -> dict[str, set[str]]:
  """Returns the arithmetic of each island of a program, by the name of the island.

  If the program contains an island several times, the set has one entry per different body.
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
  """Returns the name of the island that a branch of a cond holds; None if it holds none."""
  return next(filter(None, map(_island, computations[branch])), None)


def _parse(text: str) -> dict[str, list[Instruction]]:
  """Returns the instructions of each computation of an HLO text, by the computation's name."""
  computations = {}
  lines = []
  for line in text.splitlines():
    begins = re.match(r'(?:ENTRY )?%([\w.-]+) \(.*\{$', line)
    if begins:
      lines = computations[begins[1]] = []
    elif re.match(r'  (ROOT )?%[\w.-]+ = ', line):
      lines.append(_instruction(re.sub(r'/\*.*?\*/', '', line)))
  return computations


def _instruction(line: str) -> Instruction:
  """Splits a line `%name = shape opcode(operands), attributes`."""
  name, definition = re.match(r'  (?:ROOT )?%([\w.-]+) = (.*)', line).groups()

  # The shape of a tuple is in parentheses and has spaces.
  end = _closing(definition) + 1 if definition.startswith('(') else definition.index(' ')
  shape = definition[:end]

  opcode, arguments = definition[end:].strip().split('(', 1)
  end = _closing('(' + arguments) - 1
  return Instruction(name, MEMORY.sub('', shape), opcode, arguments[:end], arguments[end + 1:])


def _closing(text: str) -> int:
  """Returns the index of the parenthesis that closes the one at the start of `text`."""
  depth = 0
  for i, letter in enumerate(text):
    depth += {'(': 1, ')': -1}.get(letter, 0)
    if depth == 0:
      return i
  raise ValueError(text)


# Opcodes that start no kernel of a GPU.
FREE = MOVES - {'copy', 'transpose'} | {'after-all', 'partition-id', 'replica-id', 'copy-done',
                                        'async-done', 'async-update', 'all-gather-done',
                                        'all-reduce-done', 'send-done', 'recv-done'}


def launches(text: str) -> float:
  """Returns the kernels that a call of a program for GPUs launches.

  A loop counts with its number of turns, where XLA knows it, else as one turn; of a conditional,
  the longer branch counts.
  """
  computations = _parse(text)
  entry = re.search(r'^ENTRY %([\w.-]+)', text, re.MULTILINE)[1]

  @functools.cache
  def of(name: str) -> float:
    return sum(map(of_line, computations[name]))

  def of_line(line: Instruction) -> float:
    if line.opcode in FREE:
      return 0
    called = [name for name in _callees(line) if name in computations]
    if line.opcode == 'while':
      turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.attributes)
      return (int(turns[1]) if turns else 1) * sum(map(of, called))
    if line.opcode == 'conditional':
      return max(map(of, called))
    return sum(map(of, called)) if line.opcode == 'call' else 1

  return of(entry)


def kernels(text: str) -> dict[str, set[str]]:
  """Returns the kernels of each island of a program for GPUs or TPUs, by the name of the island.

  Kernels that only move numbers are left out.
  """
  computations = _parse(text)
  # What fusions and reductions consist of is no kernel of its own.
  inner = {name for lines in computations.values() for line in lines
           if line.opcode not in ('while', 'conditional', 'call')
           for _, names in CALLED.findall(line.attributes)
           for name in re.findall(r'%([\w.-]+)', names)}
  of_islands = collections.defaultdict(set)
  for name, lines in computations.items():
    if name in inner:
      continue
    for line in lines:
      island = _island(line)
      if island and line.opcode not in FREE and not _moves(computations, line):
        of_islands[island].add(_formula(computations, line))
  return dict(of_islands)


def _island(line: Instruction) -> str | None:
  """Returns the name of the innermost island that an instruction is of."""
  return (re.findall(PREFIX + r'(\w+)', line.attributes) or [None])[-1]


def _arithmetic(computations: dict[str, list[Instruction]], name: str) -> str:
  """Returns the instructions of a computation and its callees, without names and sorted."""
  return '\n'.join(sorted(_formula(computations, line) for line in computations[name]
                          if not _moves(computations, line)))


def _moves(computations: dict[str, list[Instruction]], line: Instruction) -> bool:
  """Returns whether an instruction only moves numbers."""
  if line.opcode != 'fusion':
    return line.opcode in MOVES
  (called,) = re.findall(r'calls=%([\w.-]+)', line.attributes)
  return all(inner.opcode in MOVES for inner in computations[called])


def _formula(computations: dict[str, list[Instruction]], line: Instruction) -> str:
  """Returns an instruction's opcode, shape and attributes, and the computations it calls."""
  attributes, inner = _called(computations, line)
  # A loop may carry the same arrays in another order, and a fusion may return them in one.
  shape = '' if line.opcode in ('while', 'call') or line.shape.startswith('(') else line.shape
  return f'{line.opcode} {shape}{attributes} {inner}'


def _called(computations: dict[str, list[Instruction]], line: Instruction) -> tuple[str, list[str]]:
  """Returns an instruction's attributes without names, and the computations that it calls."""
  attributes = TPU_CONFIG.sub(lambda config: _order_of_sums(computations, line, config[1]),
                              line.attributes)
  attributes = NAMES.sub('', attributes)
  return CALLED.sub('', attributes), [_body(computations, name, line.opcode)
                                      for name in _callees(line)]


def _callees(line: Instruction) -> list[str]:
  """Returns the names of the computations that an instruction calls."""
  return [name for _, names in CALLED.findall(line.attributes)
          for name in re.findall(r'%([\w.-]+)', names)]


def _order_of_sums(computations: dict[str, list[Instruction]], line: Instruction, config: str
                   ) -> str:
  """Returns what fixes the order in which a TPU's kernel adds.

  The rest of the configuration - estimates of costs, and where arrays lie in memory - depends on
  other kernels of the program.
  """
  adds = {'convolution', 'reduce', 'reduce-window'}

  def has_sums(line):
    return line.opcode in adds or any(has_sums(inner) for name in _callees(line)
                                      for inner in computations[name])

  if not has_sums(line):
    return ''
  fields = json.loads(config)
  bounds = {name: value for name, value in fields.get('window_config', {}).items()
            if name.endswith('_bounds')}
  return f' {bounds} {fields.get("convolution_algorithm_config")}'


def _body(computations: dict[str, list[Instruction]], name: str, opcode: str) -> str:
  """Returns a called computation: a fusion as expressions, another as sorted instructions.

  Equal expressions of a fusion get one number, since XLA may compute an expression twice.
  """
  if opcode != 'fusion':
    return _arithmetic(computations, name)
  lines = {line.name: line for line in computations[name]}
  root = computations[name][-1]
  results = re.findall(r'%([\w.-]+)', root.operands) if root.opcode == 'tuple' else [root.name]
  return ' and '.join(sorted(_expression(computations, lines, result) for result in results))


def _expression(computations: dict[str, list[Instruction]], lines: dict[str, Instruction],
                result: str) -> str:
  """Returns a result of a fusion as numbered expressions.

  Args:
    computations: of the program.
    lines: of the fusion, by name.
    result: the name of one of them.
  """
  numbers: dict[str, int] = {}  # of expressions

  @functools.cache
  def number(name: str) -> int:
    line = lines[name]
    if line.opcode == 'parameter':
      return numbers.setdefault(f'{line.shape} parameter {len(numbers)}', len(numbers))
    attributes, inner = _called(computations, line)
    operands = [f'#{number(operand)}' for operand in re.findall(r'%([\w.-]+)', line.operands)]
    values = ', '.join(operands) or line.operands  # a constant has a literal instead of operands
    return numbers.setdefault(
        f'{line.shape} {line.opcode}({values}){attributes}{inner}', len(numbers))

  number(result)
  return '; '.join(numbers)
