"""Printing to closed streams, and in encodings that lack a character."""

import io
import shlex
import subprocess
import sys

import pytest

from podracer_jit.runtime import output

COMMAND = [sys.executable, '-m', 'podracer_jit', 'configs']


def ascii_stream():
  return io.TextIOWrapper(io.BytesIO(), encoding='ascii', write_through=True)


def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch):
  stream = ascii_stream()
  lasting = output.LastingStream(stream)
  lasting.write('runs/é\n')
  lasting.write('finished\n')
  monkeypatch.setattr(sys, 'stdout', stream)
  output.say('runs/\u4e2d')
  assert stream.buffer.getvalue() == b'runs/\\xe9\nfinished\nruns/\\u4e2d\n'


@pytest.mark.parametrize('encoding', ['utf-8', 'latin-1'])
def test_other_characters_are_printed_as_they_are(encoding):
  stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
  output.LastingStream(stream).write('é')
  assert stream.buffer.getvalue() == 'é'.encode(encoding)


@pytest.mark.parametrize('closed', ['<&-', '>&-', '2>&-', '<&- >&- 2>&-'])
def test_a_command_whose_streams_are_closed_ends_as_with_open_ones(closed):
  done = subprocess.run(['bash', '-c', f'{shlex.join(COMMAND)} {closed}'], capture_output=True,
                        text=True, timeout=120, check=False)
  assert done.returncode == 0, done.stderr
  assert ('ppo_cartpole' in done.stdout) == ('>&-' not in closed.replace('2>&-', ''))


def test_a_closed_stream_drops_its_text():
  stream = ascii_stream()
  lasting = output.LastingStream(stream)
  stream.close()
  assert lasting.write('text') == 4
  lasting.flush()
