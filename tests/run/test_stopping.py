"""What signals do before training, in training and while something is saved."""

import signal

import pytest

from podracer_jit.run import stopping


@pytest.fixture(autouse=True)
def not_ignored():
  """Tests that run in the background, or by nohup, have signals that are ignored."""
  before = {number: signal.signal(number, signal.SIG_DFL) for number in stopping.SIGNALS}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', stopping.SIGNALS)
def test_before_training_a_signal_ends_the_process(number):
  before, calls = signal.getsignal(number), []
  with stopping.handled(leave=lambda: calls.append(1)):
    signal.raise_signal(number)
  assert signal.getsignal(number) == before
  assert calls == [1]


@pytest.mark.parametrize('number', stopping.SIGNALS)
def test_in_training_the_first_asks_and_the_second_interrupts(number):
  now = 0.0
  with stopping.handled(clock=lambda: now) as stop:
    stop.begin_training()
    assert not stop.asked()
    signal.raise_signal(number)
    assert stop.asked()
    now = 0.4
    signal.raise_signal(number)  # the same, from another sender
    now = 1.0
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(number)


def test_nothing_interrupts_while_something_is_saved():
  now = 0.0
  with stopping.handled(clock=lambda: now) as stop:
    stop.begin_training()
    signal.raise_signal(signal.SIGINT)
    with stop.saving():
      now = 1.0
      signal.raise_signal(signal.SIGTERM)
      now = 2.0
      signal.raise_signal(signal.SIGTERM)
    assert stop.asked()
    now = 3.0
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGTERM)


def test_at_the_end_signals_do_nothing():
  now = 0.0
  with stopping.handled(clock=lambda: now) as stop:
    stop.begin_training()
    stop.end()
    for now in (1.0, 2.0, 3.0):  # noqa: B007 - the clock reads it
      signal.raise_signal(signal.SIGTERM)


def test_a_hangup_that_was_ignored_stays_ignored():
  """As nohup has it."""
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with stopping.handled() as stop:
      signal.raise_signal(signal.SIGHUP)
      assert not stop.asked()
  finally:
    signal.signal(signal.SIGHUP, before)
