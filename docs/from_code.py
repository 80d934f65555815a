"""Sphinx extension: parts of the pages that come from the code, MathML, and links between pages.

Directives, which all write Markdown:

  fields SECTION [NAME]    table of the options of a section of configs, or of one of its parts
  parts SECTION            the same of each part that a section may choose
  docstring OBJECT         docstring of a module or a class
  terms ALGORITHM          table of the metrics that only some algorithms write
  verbs                    help of each verb of the command
  errors                   table of the errors, with the exit codes of commands

Files outside of docs/, such as ARCHITECTURE.md, are pages, too (`PAGES`). Links in all pages are
those that work in the repository; the site leads them to its own pages.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from podracer_jit import errors, metrics, options
from podracer_jit.cli import main as commands
from podracer_jit.experiment import schema
from podracer_jit.losses.algorithm import Algorithm, weighted_loss
from podracer_jit.replay.options import ReplayOptions
from podracer_jit.schemes.table import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site whose text is a file outside of docs/.
PAGES = {'architecture': 'ARCHITECTURE.md', 'changelog': 'CHANGELOG.md',
         'contributing': 'CONTRIBUTING.md', 'gpu_day': 'benchmarks/gpu_day/README.md'}


def table(*rows: tuple[str, ...]) -> str:
  """Returns a Markdown table; the first row is its head."""
  rows = (rows[0], ('---',) * len(rows[0]), *rows[1:])
  return '\n'.join(f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in row)} |'
                   for row in rows)


# Fields of configs.


def fields(section: str, name: str = '') -> str:
  """Returns the table of the options of a section of configs.

  Args:
    section: 'run', the fields without a section; or the name of a section.
    name: a part that the section may choose, such as 'ppo' or module:Class; without it, the options
      that do not depend on the part.
  """
  if section == 'run':
    rows = [('`scheme`', f'`{schema.SCHEME}`', _one_of(SCHEMES), 'who waits for whom'),
            ('`policy`', f'`{schema.POLICY}`', _one_of(('auto', *schema.FAMILIES)),
             'distribution of actions; auto: the first that fits the algorithm and the actions')]
    return _table_of_fields([*_rows('', schema.TrainingOptions), *rows])
  return _table_of_fields([
      row for cls in _classes(section, name) for row in _rows(f'{section}.', cls)])


def _classes(section: str, name: str) -> tuple[type, ...]:
  if name:
    return (schema.find_part(section, name),)
  shared = {'env': schema.EnvOptions, 'replay': ReplayOptions, 'network': schema.TorsoOptions}
  return ((schema.SECTIONS | shared)[section],)


def parts(section: str) -> str:
  """Returns the options of each part that the package has for a section, under its name."""
  names = schema.CHOICES[section].shipped
  return '\n\n'.join(f'### `{name}`\n\n{docstring_of(part)}\n\n{fields(section, name)}'
                     for name, part in names.items())


def _table_of_fields(rows: list[tuple[str, ...]]) -> str:
  return table(('field', 'default', 'range', 'meaning'), *rows)


def _rows(prefix: str, part: type) -> Iterator[tuple[str, str, str, str]]:
  defaults = options.defaults(part)
  for name, meaning in options.meanings(part).items():
    default = defaults[name]
    shown = '' if default == '' else f'`{_number(default)}`'
    yield f'`{prefix}{name}`', shown, range_of(default, meaning), meaning.help


def _number(value: Any) -> str:
  return f'{value:_}' if isinstance(value, int) and not isinstance(value, bool) else repr(
      value).strip("'")


def _one_of(words: Any) -> str:
  return ', '.join(f'`{word}`' for word in words)


def range_of(default: Any, meaning: options.Meaning) -> str:
  """Returns the values that an option may have, in words.

  Args:
    default: the option's default, whose type is the option's.
    meaning: its limits.
  """
  if isinstance(default, bool):
    return 'True, False'
  if meaning.choices:
    return _one_of(meaning.choices)
  if isinstance(default, str):
    return 'text'
  element = default
  kind = 'number'
  if isinstance(default, tuple):
    element = default[0] if default else meaning.element
    kind = 'numbers'
    if isinstance(element, str):
      return 'texts'
  if isinstance(element, int):
    kind = f'whole {kind}'
  limits = [f'{word} {_limit(limit)}' for word, limit in (
      ('from', meaning.at_least), ('above', meaning.above), ('to', meaning.at_most),
      ('below', meaning.below)) if limit is not None]
  return ' '.join([kind, *limits])


def _limit(limit: float) -> str:
  for power in (31, 53):
    if abs(limit - 2**power) <= 1:
      return f'2^{power}' + (' - 1' if limit < 2**power else '')
  return f'{limit:,}' if isinstance(limit, int) else f'{limit:g}'


# Algorithms.


def _object(path: str) -> Any:
  """Returns a module, or what a module has: 'podracer_jit.losses.ppo.PPO'."""
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError:
    module, _, name = path.rpartition('.')
    return getattr(importlib.import_module(module), name)


def docstring(path: str) -> str:
  """Returns the docstring of a module or a class, which is Markdown."""
  return docstring_of(_object(path))


def docstring_of(thing: Any) -> str:
  """Returns a docstring, which is Markdown, with its commands as blocks of code."""
  def block(command: re.Match) -> str:
    # A line that the source continues has the indentation of its next part.
    return f'```sh\n{re.sub(" {2,}", f" {chr(92)}{chr(10)}    ", command[0])}\n```'

  return re.sub(r'(?m)^podracer_jit .*$', block, inspect.getdoc(thing) or '')


def terms_of(algorithm: type[Algorithm]) -> list[str]:
  """Returns the names of the terms that an algorithm's loss adds to the metrics of an update.

  They are read from the source of its class and of its base classes: names of metrics of losses,
  and the keys of dicts where an `Aux` is made. `tests/test_site.py` compares them with what an
  update writes.
  """
  named: set[str] = set()
  for cls in algorithm.__mro__:
    if issubclass(cls, Algorithm) and cls is not Algorithm:
      source = inspect.getsource(inspect.getmodule(cls))
      if 'weighted_loss(' in source:
        source += inspect.getsource(weighted_loss)
      named |= set(_names_of_terms(ast.parse(source)))
  known = [name for name in metrics.UPDATES if name in named]
  return known + sorted(named - set(known))


def _names_of_terms(tree: ast.Module) -> Iterator[str]:
  known = {name for name, metric in metrics.UPDATES.items() if metric.shown.startswith(
      ('losses/', 'replay/importance_weight'))}
  for function in ast.walk(tree):
    if not isinstance(function, ast.FunctionDef):
      continue
    calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
    if 'Predictions.of' in calls:
      yield 'explained_variance'
    for node in ast.walk(function):
      keys = []
      if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
      elif isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict':
        keys = [keyword.arg for keyword in node.keywords]
      yield from (key for key in keys if key in known or 'Aux.of' in calls)


def terms(path: str) -> str:
  """Returns the table of the metrics that an algorithm adds."""
  return table(('name', 'in TensorBoard', 'meaning'),
               *((f'`{name}`', f'`{metrics.shown(name)}`', metrics.UPDATES[name].meaning
                  if name in metrics.UPDATES else '') for name in terms_of(_object(path))))


# The command.


def verbs() -> str:
  """Returns a section for each verb, with what its --help prints."""
  return '\n\n'.join(f'## {verb}\n\n{_help(verb)}' for verb in commands.VERBS)


def _help(verb: str) -> str:
  """Returns the help of a verb, its flags as a table."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    commands.main(['podracer_jit', verb, '--help'])
  text, _, described = out.getvalue().partition('\n\n\n')
  text = examples_as_code(text.strip())
  rows = []
  own = described.partition('absl.flags:')[0]
  for name, flag in re.findall(r'(?ms)^  --(\S+): (.*?)(?=^\S|^  -|\Z)', own):
    default = re.search(r"\(default: '(.*?)'\)", flag)
    meaning = ' '.join(re.sub(r'\((default: .*?|an? .*?)\)(?=\n)', '', flag).split())
    rows.append((f'`--{name}`', f'`{default[1]}`' if default and default[1] else '', meaning))
  return f'{text}\n\n{table(("flag", "default", "meaning"), *rows)}' if rows else text


def examples_as_code(text: str) -> str:
  """Returns a text whose indented paragraphs are blocks of code."""
  paragraphs = text.split('\n\n')
  return '\n\n'.join(f'```text\n{textwrap.dedent(paragraph)}\n```' if paragraph.startswith('  ')
                     else paragraph for paragraph in paragraphs)


def table_of_errors() -> str:
  """Returns the table of the classes of errors."""
  rows = []

  def visit(cls: type[errors.PodracerError], depth: int) -> None:
    first = (inspect.getdoc(cls) or '').partition('\n\n')[0]
    indent = '&nbsp;' * 4 * depth
    code = '3, 130' if cls is errors.Stopped else str(cls.code)
    rows.append((f'{indent}`{cls.__name__}`', code, ' '.join(first.split())))
    for below in cls.__subclasses__():
      if below.__module__ == errors.__name__:
        visit(below, depth + 1)

  visit(errors.PodracerError, 0)
  return table(('error', 'exit code', 'meaning'), *rows)


WRITERS: Mapping[str, Callable[..., str]] = {
    'fields': fields, 'parts': parts, 'docstring': docstring, 'terms': terms, 'verbs': verbs,
    'errors': table_of_errors}


class FromCode(SphinxDirective):
  """Shows the Markdown of a function of WRITERS, which gets the directive's arguments."""

  optional_arguments = 2

  def run(self) -> list[nodes.Node]:
    """Returns the parsed text."""
    text = WRITERS[self.name](*self.arguments)
    node = nodes.Element()
    self.state.nested_parse(StringList(text.splitlines(), self.name), self.content_offset, node,
                            match_titles=True)
    return node.children


# Pages and links.


def read(app: Sphinx, docname: str, source: list[str]) -> None:
  """Gives pages of PAGES their text, and leads links to pages of the site."""
  path = ROOT / 'docs' / f'{docname}.md'
  if docname in PAGES:
    path = ROOT / PAGES[docname]
    app.env.note_dependency(str(path))
    source[0] = path.read_text()
  source[0] = re.sub(r'\]\(([^)#\s]+)(#[^)\s]*)?\)',
                     lambda link: f']({lead(path, docname, link[1])}{link[2] or ""})', source[0])


def lead(path: Path, docname: str, target: str) -> str:
  """Returns the target of a link on the site.

  Args:
    path: the file that has the link.
    docname: its page.
    target: the link's file, relative to `path`, or an address.
  """
  if re.match(r'[a-z]+:', target):
    return target
  file = Path(os.path.normpath(path.parent / target))
  pages = {ROOT / name: ROOT / 'docs' / f'{page}.md' for page, name in PAGES.items()}
  pages[ROOT / 'README.md'] = ROOT / 'docs' / 'index.md'
  file = pages.get(file, file)
  return os.path.relpath(file, (ROOT / 'docs' / docname).parent)


# Docstrings of the Python interface, which autodoc reads as reStructuredText.


def process_docstring(app: Sphinx, what: str, name: str, obj: Any, settings: Any,
                      lines: list[str]) -> None:
  """Turns a docstring into reStructuredText, which napoleon reads next.

  Indented paragraphs become blocks of code, unless a section has them; in all others, characters
  that reStructuredText would read as markup are escaped, outside of backticks.
  """
  written: list[str] = []
  is_code = False
  for line in lines:
    if not line.strip():
      written.append(line)
      continue
    was_code = is_code
    after_blank = not written or not written[-1].strip()
    indented = line.startswith('  ')
    in_section = any(re.fullmatch(r'[A-Z]\w*:', before) for before in written)
    is_code = indented and not in_section and (was_code or after_blank)
    if is_code and not was_code:
      written += ['::', '']
    written.append(line if is_code else ''.join(
        part if part.startswith('`') else re.sub(r'([*|])', r'\\\1', part)
        for part in re.split(r'(`[^`]*`)', line)))
  lines[:] = written


# Mathematics as MathML, which browsers draw by themselves.


def _math(self: Any, node: nodes.Node, as_block: bool) -> None:
  formula = latex2mathml.tex2mathml(node.astext(), as_block=as_block)
  self.body.append(f'<div class="formula">{formula}</div>' if as_block else formula)
  raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
  """Adds all of this to Sphinx."""
  for name in WRITERS:
    app.add_directive(name, FromCode)
  app.add_html_math_renderer(
      'mathml', (lambda self, node: _math(self, node, False), None),
      (lambda self, node: _math(self, node, True), None))
  app.connect('source-read', read)
  app.connect('autodoc-process-docstring', process_docstring, priority=400)  # before napoleon
  return {'parallel_read_safe': True, 'parallel_write_safe': True}
