"""The thread that draws the live display."""

import contextlib
import io
import threading

import pytest
from rich.console import Console

from podracer_jit.training.progress import Progress
from tests.training.test_sinks import EXPERIMENT, RECORD

pytestmark = pytest.mark.implementation


def test_the_live_block_is_not_drawn_by_the_reporting_thread(monkeypatch):
  threads = []
  monkeypatch.setattr(Progress, '_block', lambda self: threads.append(threading.get_ident()) or '')
  console = Console(file=io.StringIO(), force_terminal=True)
  with contextlib.closing(Progress(EXPERIMENT, 'a title', console)) as progress:
    assert threads.pop() == threading.get_ident()  # when it begins
    for _ in range(20):
      progress.update(dict(RECORD), {})
    assert threading.get_ident() not in threads
