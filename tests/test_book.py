"""The pages of docs/ that quote the code: messages, names of fields, pictures; and the tutorial."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import pictures
from podracer_jit import experiment
from podracer_jit.runtime import coordinator
from tests import processes
from tests.lint import _fields as fields_of_configs
from tests.rooms import PACKAGE, ROOT, TREES

DOCS = ROOT / 'docs'
VALUE = '\0'  # stands for a value in a message


def texts_of_the_source() -> list[str]:
  """Returns all strings of the package and its scripts; VALUE stands for what is filled in."""
  texts = []
  for module, tree in TREES.items():
    def part(node, module=module):
      if isinstance(node, ast.Constant):
        return str(node.value)
      # The one flag that messages of several lines begin with.
      is_flag = module == 'runtime.coordinator' and getattr(node.value, 'id', '') == 'FLAG'
      return coordinator.FLAG if is_flag else VALUE

    for node in ast.walk(tree):
      if isinstance(node, ast.JoinedStr):
        texts.append(''.join(map(part, node.values)))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(re.sub(r'%(\.0f|s|d)', VALUE, node.value))  # of a logger
  for name in ('_venv', 'train'):
    script = re.sub(r'" *\\\n *"', ' ', (ROOT / 'scripts' / name).read_text())
    texts.append(re.sub(r'\$\{[^}]*\}|\$\w+', VALUE, script))
  return [re.sub(f'{VALUE}+', VALUE, text) for text in texts]


def quoted_messages() -> list[str]:
  """Returns the first cells of the tables of docs/troubleshooting.md."""
  return re.findall(r'^\| `([^`]+)` \|', (DOCS / 'troubleshooting.md').read_text(), re.MULTILINE)


def is_quoted(message: str, texts: list[str]) -> bool:
  """Returns whether a text of the source has a message, whose '...' stand for values.

  Values may be empty at either end, and one '...' may stand for a value and the text beside it.
  """
  parts = [part for part in message.split('...') if part]
  pattern = re.compile(f'[^\\n]*{VALUE}[^\\n]*'.join(map(re.escape, parts)))
  return any(pattern.search(text) for text in texts)


def test_troubleshooting_quotes_the_messages_of_the_code():
  texts = texts_of_the_source()
  messages = quoted_messages()
  assert len(messages) > 40
  assert [message for message in messages if not is_quoted(message, texts)] == []


@pytest.mark.parametrize('message, expected', [
    ('--config=...: there is no such file, and no shipped config of that name', True),
    ('--config=...: there is no such fiel, and no shipped config of that name', False),
    ('env.task: ... has several players; single-player tasks only for now', True),
    ('env.task: Pong-v5 has several players; single-player tasks only for now', False)])
def test_a_message_must_be_quoted_exactly(message, expected):
  assert is_quoted(message, texts_of_the_source()) is expected
