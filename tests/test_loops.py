"""Workers on threads give the same results as one thread, and always end."""

import contextlib
import random
import sys
import threading
import time
import weakref

import pytest

from podracer_jit import loops
from podracer_jit.loops import Endpoint, Worker, run, run_serial
from podracer_jit.runtime.channels import Closed, DoubleBuffer, FifoQueue, Versioned
from tests import processes
from tests.workers import not_writer, wrap

HANG_S = 60  # no run of a test takes so long unless it hangs


def must_end(function, within_s=HANG_S):
  """Returns or raises what `function` does; fails if it hangs."""
  result = []
  def call():
    try:
      result.append((function(), None))
    except BaseException as error:  # noqa: BLE001 - raised again below
      result.append((None, error))

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(within_s)
  assert result, 'hangs'
  (value, error), = result
  if error is not None:
    raise error
  return value


def make_graph(lag=0, actors=2, firings=20, nap=lambda: None, every=1, until=lambda state: False,
          tamper=lambda workers: workers, primed=1):
  """Returns actors, a learner and a writer, connected as in a training run.

  The state of a worker is the history of its numbers. The arithmetic does not commute, so that
  another order or lag gives other numbers.

  Args:
    lag: updates between parameters and the rollouts made with them.
    actors: number of actors.
    firings: of each actor and of the learner.
    nap: called in each firing.
    every: actors get parameters, and the writer gets a report, once in so many firings.
    until: ends the learner when true of its state.
    tamper: a function from workers to workers.
    primed: the value of the first parameters.
  """
  gets = -(-firings // every)
  params = [DoubleBuffer(f'parameters {i}', gets, lag) for i in range(actors)]
  rollouts = [DoubleBuffer(f'rollouts {i}', firings) for i in range(actors)]
  reports = DoubleBuffer('reports', firings // every)
  for channel in params:
    channel.prime(Versioned(primed, 0))

  def actor(i):
    def fire(history, params):
      nap()
      rollout = (params.value * 31 + len(history) * 7 + i) % 10007
      return (*history, (rollout, params.version)), [Versioned(rollout, params.version)]
    return fire

  def learner(history, *batch):
    nap()
    value = 17
    for item in batch:
      value = (value * 13 + item.value) % 10007
    item = Versioned(value, len(history) + 1)
    lags = [len(history) - rollout.version for rollout in batch]
    return (*history, (value, *lags)), [item] * (actors + 1)

  def writer(history, report):
    nap()
    return (*history, report), []

  def worker(name, fire, reads, writes, firings, **options):
    return Worker(name, fire, (), reads, writes, firings, **options)

  return tamper([
      *(worker(f'actor {i}', actor(i), [Endpoint(params[i], every)], [Endpoint(rollouts[i])],
               firings) for i in range(actors)),
      worker('learner', learner, [Endpoint(r) for r in rollouts],
             [*(Endpoint(p, every) for p in params), Endpoint(reports, every)], firings,
             until=until),
      worker('writer', writer, [Endpoint(reports)], [], firings // every)])


def random_naps(seed):
  rng = random.Random(seed)
  return lambda: time.sleep(rng.choice([0, 0, 1e-4, 3e-3]))


# Order.


@pytest.mark.parametrize('lag', [0, 1])
@pytest.mark.parametrize('actors', [1, 3])
@pytest.mark.parametrize('every', [1, 4])
def test_threads_give_the_same_states_as_one_thread(lag, actors, every):
  serial = must_end(lambda: run_serial(make_graph(lag, actors, every=every)))
  assert {name: len(history) for name, history in serial.items()} == {
      **{f'actor {i}': 20 for i in range(actors)}, 'learner': 20, 'writer': 20 // every}
  for seed in range(3):
    nap = random_naps(seed)
    threaded = must_end(lambda nap=nap: run(make_graph(lag, actors, every=every, nap=nap)))
    assert threaded == serial


@pytest.mark.quick
@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
def test_the_first_lag_is_0_and_the_others_are_exact(runner, lag):
  history = must_end(lambda: runner(make_graph(lag)))['learner']
  assert [lags for _, *lags in history] == [[0, 0]] + [[lag, lag]] * 19


def test_an_endpoint_is_used_once_in_so_many_firings():
  """A reader gets at the first firing and keeps the value; a writer puts at the last."""
  source = DoubleBuffer('source', 3)
  sink = DoubleBuffer('sink', 3)
  workers = [
      Worker('maker', lambda n: (n + 1, [Versioned(n, n)]), 0, [], [Endpoint(source)], 3),
      Worker('user', lambda values, item: ((*values, item.value), [Versioned(len(values), 0)]), (),
             [Endpoint(source, 4)], [Endpoint(sink, 4)], 12),
      Worker('end', lambda values, item: ((*values, item.value), []), (), [Endpoint(sink)], [], 3)]
  states = must_end(lambda: run(workers))
  assert states['user'] == (0,) * 4 + (1,) * 4 + (2,) * 4
  assert states['end'] == (3, 7, 11)


def test_none_is_not_put():
  channel = DoubleBuffer('odd numbers', 3)
  workers = [
      Worker('maker', lambda n: (n + 1, [Versioned(n, n) if n % 2 else None]), 0, [],
             [Endpoint(channel)], 6),
      Worker('taker', lambda values, item: ((*values, item.value), []), (), [Endpoint(channel)], [],
             3)]
  assert must_end(lambda: run(workers))['taker'] == (1, 3, 5)


class Computed:
  """A value for which jax.block_until_ready calls `ready`."""

  def __init__(self, ready):
    self.block_until_ready = ready


def test_a_worker_fires_before_its_inputs_are_computed_and_again_after_its_output_is():
  """Each value is computed only after the next worker has fired; waiting earlier would hang."""
  fired = {name: [threading.Event() for _ in range(6)] for name in ('actor 0', 'learner')}
  computed = []

  def firing(call, history, *inputs):
    name = call.worker
    k = len(history)
    reader = 'learner' if name == 'actor 0' else 'actor 0'
    assert computed.count(name) == k
    fired[name][k].set()
    reader_k = k if name == 'actor 0' else k + 1  # the actor uses the parameters in its next firing

    def ready():
      assert reader_k == 5 or fired[reader][reader_k].wait(HANG_S)
      computed.append(name)

    history, (item, *others) = call.fire(history, *(x._replace(value=x.value[0]) for x in inputs))
    return history, [item._replace(value=(item.value, Computed(ready))), *others]

  workers = make_graph(actors=1, firings=5, tamper=wrap(not_writer, instead=firing), primed=(1,))
  states = must_end(lambda: run(workers))
  assert states == must_end(lambda: run_serial(make_graph(actors=1, firings=5)))
  assert computed.count('actor 0') == 5


@pytest.mark.parametrize('call', [lambda value: None, lambda value: value.block_until_ready()])
def test_the_wait_for_a_value_counts_for_its_reader(call):
  """The call of a program may wait itself, as programs for several CPU devices do."""
  first = DoubleBuffer('first', 3)
  second = DoubleBuffer('second', 3)
  begun = [threading.Event() for _ in range(3)]

  def make(n):
    def slow():  # ends 0.1 s after the user has begun to wait
      assert begun[n].wait(HANG_S)
      time.sleep(0.1)
    return n + 1, [Versioned(Computed(slow), n)]

  def use(n, item):
    begun[n].set()
    call(item.value)
    return n + 1, [Versioned(n, n)]

  must_end(lambda: run([
      Worker('maker', make, 0, [], [Endpoint(first)], 3),
      Worker('user', use, 0, [Endpoint(first)], [Endpoint(second)], 3),
      Worker('end', lambda n, item: (n + 1, []), 0, [Endpoint(second)], [], 3)]))
  assert first.get_wait_s >= 0.3
  assert first.put_wait_s < first.get_wait_s / 2


# Ends.


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
def test_until_ends_all_workers_after_the_writer_has_drained_its_channel(runner, lag):
  def learner(call, history, *batch):  # its last firing puts no parameters, since none are used
    history, (*params, report) = call.fire(history, *batch)
    return history, [None if len(history) == 7 else p for p in params] + [report]

  def tamper(workers):
    workers = wrap('learner', instead=learner)(workers)
    return wrap('writer', before=lambda *_: time.sleep(0.02))(workers)

  full = must_end(lambda: run_serial(make_graph(lag)))
  states = must_end(lambda: runner(make_graph(lag, until=lambda history: len(history) == 7,
                                      tamper=tamper)))
  assert states['learner'] == full['learner'][:7]
  assert states['writer'] == full['writer'][:7]
  for i in range(2):  # an actor may be one rollout ahead
    rollouts = states[f'actor {i}']
    assert rollouts == full[f'actor {i}'][:len(rollouts)] and 7 <= len(rollouts) <= 7 + lag


def reader_of_one_and_reader_of_all(value):
  """Returns a producer of `value(k)` and two readers; one of them ends before the second value.

  By then the producer has put its second value for the other reader, which waits until it is
  computed.
  """
  closed = threading.Event()

  class ClosingBuffer(DoubleBuffer):
    def close(self):
      super().close()
      closed.set()

  lasting = DoubleBuffer('lasting', 9)
  ending = ClosingBuffer('ending', 9)
  turns = DoubleBuffer('turns', 9, 0)  # makes run_serial end the reader of one in time, too
  turns.prime(Versioned(None, 0))

  def produce(k, turn):
    assert k == 0 or closed.wait(HANG_S)
    return k + 1, [Versioned(value(k), k)] * 2

  def read(versions, item):
    return (*versions, item.version), [Versioned(None, 0)]

  return [Worker('reader of one', lambda n, item: (n + 1, []), 0, [Endpoint(ending)], [], 1),
          Worker('reader of all', read, (), [Endpoint(lasting)], [Endpoint(turns)], 9),
          Worker('producer', produce, 0, [Endpoint(turns)],
                 [Endpoint(lasting), Endpoint(ending)], 9)]


@pytest.mark.parametrize('runner', [run, run_serial])
def test_a_reader_learns_that_a_value_is_computed_though_another_reader_has_ended(runner):
  states = must_end(lambda: runner(reader_of_one_and_reader_of_all(lambda k: k)))
  assert states == {'producer': 2, 'reader of one': 1, 'reader of all': (0, 1)}


class Boom(Exception):
  pass


@pytest.mark.parametrize('runner', [run, run_serial])
def test_a_computation_that_fails_after_another_reader_has_ended_is_raised(runner):
  """The reader never learns that the value is computed."""
  def ready():
    raise Boom('failed later')

  waited = []  # `until` is called after the inputs of a firing are computed
  workers = [worker._replace(until=lambda versions: waited.append(versions))
             if worker.name == 'reader of all' else worker
             for worker in reader_of_one_and_reader_of_all(lambda k: Computed(ready) if k else k)]
  with pytest.raises(Boom, match='failed later'):
    must_end(lambda: runner(workers))
  assert waited == [(0,)]


def fails(worker, firing=6):
  """Returns a `tamper` that makes a worker fail in one of its firings."""
  def fail(call, *_):
    if call.number == firing:
      raise Boom(f'{worker} has failed')
  return wrap(worker, before=fail)


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
@pytest.mark.parametrize('worker_name', ['actor 0', 'actor 1', 'learner', 'writer'])
def test_the_first_exception_ends_every_thread_and_is_raised(runner, lag, worker_name):
  with pytest.raises(Boom, match=f'{worker_name} has failed'):
    must_end(lambda: runner(make_graph(lag, tamper=fails(worker_name))))
  names = {worker.name for worker in make_graph()}
  assert not names & {t.name for t in threading.enumerate()}


@pytest.mark.parametrize('runner', [run, run_serial])
def test_a_worker_begins_before_it_reads_and_a_failure_there_ends_the_graph(runner):
  def graph(begin):
    return [Worker('reads', lambda state, item: (events.append('fires'), []), None,
                   [Endpoint(items)], [], 1, begin=begin),
            Worker('writes', lambda state: (state, [Versioned(0, 0)]), None, [],
                   [Endpoint(items)], 1)]

  def fail():
    raise Boom('cannot begin')

  events = []
  items = DoubleBuffer('items', 1)
  must_end(lambda: runner(graph(lambda: events.append('begins'))))
  assert events == ['begins', 'fires']
  items = DoubleBuffer('items', 1)
  with pytest.raises(Boom, match='cannot begin'):
    must_end(lambda: runner(graph(fail)))


def test_an_exception_is_raised_instead_of_the_closed_channel_of_a_waiting_worker():
  waiting = DoubleBuffer('never made', 1)
  def fire(state):
    time.sleep(0.1)
    raise Boom('alone')

  workers = [Worker('waits', lambda state, item: (state, []), None, [Endpoint(waiting)], [], 1),
             Worker('fails', fire, None, [], [Endpoint(waiting)], 1)]
  with pytest.raises(Boom, match='alone'):
    must_end(lambda: run(workers))
  with pytest.raises(Closed):
    waiting.get()


def test_an_exception_ends_workers_that_share_no_channel():
  def fire(state):
    time.sleep(0.1)
    raise Boom('alone')

  endless = make_graph(firings=10**9, nap=lambda: time.sleep(1e-3))
  with pytest.raises(Boom, match='alone'):
    must_end(lambda: run([*endless, Worker('fails', fire, None, [], [], 1)]))
  assert not {worker.name for worker in endless} & {t.name for t in threading.enumerate()}


@pytest.mark.parametrize('runner', [run, run_serial])
def test_an_error_of_a_started_program_is_raised(runner):
  """The error of the program is raised, not that of the worker that waited for it."""
  def ready():
    raise Boom('failed later')

  def starts(call, *args):
    history, (item,) = call.fire(*args)
    return history, [item._replace(value=Computed(ready)) if len(history) == 5 else item]

  def learner(call, history, *batch):
    return (*history, 0), [Versioned(0, len(history) + 1)] * 3

  workers = wrap('learner', instead=learner)(make_graph(tamper=wrap('actor 1', instead=starts)))
  with pytest.raises(Boom, match='failed later'):
    must_end(lambda: runner(workers))


def end_thread(release, name):
  """Ends the thread that a Stuck run has left behind."""
  release.set()
  for thread in threading.enumerate():
    if thread.name == name:
      thread.join(HANG_S)


def test_threads_that_do_not_end_are_named():
  release = threading.Event()
  workers = wrap('actor 1', before=lambda *_: release.wait(HANG_S))(
      make_graph(tamper=fails('learner', firing=1)))
  workers = [w._replace(reads=()) if w.name == 'learner' else w for w in workers]
  try:
    with pytest.raises(loops.Stuck, match=r'^actor 1 did not end within 0') as stuck:
      must_end(lambda: run(workers, grace_s=0.2))
    assert isinstance(stuck.value.__cause__, Boom)
  finally:
    end_thread(release, 'actor 1')


def test_the_seconds_of_grace_begin_when_what_must_not_be_cut_short_is_done():
  """A checkpoint that is being saved may take longer than threads have to end."""
  saving = threading.Event()
  may_end = threading.Event()
  saved = []
  asked = []

  def save(state):
    saving.set()
    assert may_end.wait(HANG_S)
    saved.append(True)
    saving.clear()
    return state, []

  def fail(state):
    assert saving.wait(HANG_S)
    raise ArithmeticError

  def busy():
    if saving.is_set():
      asked.append(time.monotonic())
      if asked[-1] - asked[0] > 0.5:  # far more than the seconds of grace
        may_end.set()
    return saving.is_set()

  workers = [Worker('saves', save, None, [], [], 1), Worker('fails', fail, None, [], [], 1)]
  with pytest.raises(ArithmeticError):
    must_end(lambda: run(workers, grace_s=0.1, busy=busy))
  assert saved


def test_a_thread_that_hangs_after_it_was_busy_is_named():
  release = threading.Event()
  asked = []

  def busy():
    asked.append(True)
    return len(asked) < 5

  def fail(state):
    raise ArithmeticError

  workers = [Worker('hangs', lambda state: (state, release.wait(HANG_S) and []), None, [], [], 1),
             Worker('fails', fail, None, [], [], 1)]
  try:
    with pytest.raises(loops.Stuck, match='hangs did not end within 0 s'):
      must_end(lambda: run(workers, grace_s=0.2, busy=busy))
  finally:
    release.set()


@pytest.mark.parametrize('where', ['wait_ready', 'put'])
def test_a_program_that_does_not_end_is_reported_as_its_worker(where):
  """A worker does not end before a program that it started, so that the run reports it."""
  release = threading.Event()
  begun = threading.Event()
  never = DoubleBuffer('never computed', 1)
  slot = DoubleBuffer('slot', 2)
  never.put(Versioned(Computed(lambda: release.wait(HANG_S)), 0))
  slot.put(Versioned(0, 0))  # nobody takes this value

  def start(state, *inputs):
    begun.set()
    return state, [Versioned(Computed(lambda: release.wait(HANG_S)), 0)]

  def fail(state):
    assert begun.wait(HANG_S)
    raise Boom('after it was started')

  if where == 'wait_ready':
    reads = [Endpoint(never)]
    writes = [Endpoint(DoubleBuffer('output', 1))]
  else:
    reads = []
    writes = [Endpoint(slot)]
  try:
    with pytest.raises(loops.Stuck, match='^starts did not end within 0') as stuck:
      must_end(lambda: run([Worker('starts', start, None, reads, writes, 1),
                         Worker('fails', fail, None, [], [], 1)], grace_s=0.2))
    assert isinstance(stuck.value.__cause__, Boom)
  finally:
    end_thread(release, 'starts')


def test_a_put_of_a_computed_value_does_not_delay_other_puts():
  """A slow reader of computed values does not hold up readers of values that are not computed."""
  uncomputed = DoubleBuffer('early', 3)
  computed = FifoQueue('computed', 1)
  maker = Worker('maker', lambda n: (n + 1, [Versioned(n, n)] * 2), 0, [],
                 [Endpoint(computed), Endpoint(uncomputed)], 3)
  third = threading.Event()
  def take(n, item):
    if n == 2:
      third.set()
    return n + 1, []

  def slow(state, item):  # it uses one value and one is queued, so a third cannot be put
    return (*state, third.wait(HANG_S)), []

  states = must_end(lambda: run([maker, Worker('taker', take, 0, [Endpoint(uncomputed)], [], 3),
                              Worker('slow', slow, (), [Endpoint(computed)], [], 3)]))
  assert states['slow'] == (True,) * 3


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('reads', [(0, 1), (1, 0)])
def test_a_deadlock_is_reported(runner, reads):
  """Two workers wait for each other, and no channel is primed."""
  channels = [DoubleBuffer(f'channel {i}', 1) for i in range(2)]
  workers = [Worker(f'worker {i}', lambda state, item: (state, [item]), None,
                    [Endpoint(channels[i])], [Endpoint(channels[1 - i])], 1) for i in reads]
  message = f'^no worker can go on; still running: worker {reads[0]}, worker {reads[1]}$'
  with pytest.raises(RuntimeError, match=message):
    must_end(lambda: runner(workers))
  assert not {'worker 0', 'worker 1'} & {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize('side', ['get', 'put'])
def test_a_wait_for_a_thread_outside_the_graph_is_no_deadlock(side):
  channel = FifoQueue('channel', 1)
  use = channel.get if side == 'put' else lambda: channel.put(Versioned('from outside', 0))
  worker = (Worker('writer', lambda n: (n + 1, [Versioned(n, n)]), 0, [], [Endpoint(channel)], 2)
            if side == 'put' else
            Worker('reader', lambda n, item: (n + 1, []), 0, [Endpoint(channel)], [], 1))
  outside = threading.Timer(0.5, use)  # `run` has looked several times by then
  outside.start()
  assert must_end(lambda: run([worker]))[worker.name] == worker.firings
  outside.join(HANG_S)


def test_workers_that_wait_in_turn_are_no_deadlock():
  """Each of two workers waits most of the time, but never both; `run` must check both at once."""
  class SlowlyUnlocked(DoubleBuffer):
    @contextlib.contextmanager
    def locked(self):
      with super().locked() as blocked:
        yield blocked
      time.sleep(0.02)  # checking one channel after another would find both workers waiting

  def fire(n, item):
    time.sleep(0.02)
    return n + 1, [item]

  a_to_b = SlowlyUnlocked('a to b', 40)
  b_to_a = SlowlyUnlocked('b to a', 40, 0)
  b_to_a.prime(Versioned(0, 0))
  states = must_end(lambda: run([Worker('a', fire, 0, [Endpoint(b_to_a)], [Endpoint(a_to_b)], 40),
                              Worker('b', fire, 0, [Endpoint(a_to_b)], [Endpoint(b_to_a)], 40)]))
  assert states == {'a': 40, 'b': 40}


class Large:
  """A value that takes much memory."""


def test_a_value_that_was_used_is_not_kept():
  references = []
  num_alive = []

  def make(state, turn):
    num_alive.append(sum(reference() is not None for reference in references))
    value = Large()
    references.append(weakref.ref(value))
    return state, [Versioned(value, 0)]

  slot = DoubleBuffer('values', 5)
  turns = DoubleBuffer('turns', 5, 0)
  turns.prime(Versioned(None, 0))
  run_serial([Worker('maker', make, None, [Endpoint(turns)], [Endpoint(slot)], 5),
              Worker('user', lambda state, item: (state, [Versioned(None, 0)]), None,
                     [Endpoint(slot)], [Endpoint(turns)], 5)])
  assert num_alive == [0] * 5


INTERRUPTED = """
import os, signal, threading, time
from tests.test_loops import Worker, make_graph, run
from tests.workers import wrap

def interrupts(call, *_):
  if call.worker == 'learner' and call.number == 6:
    os.kill(os.getpid(), signal.SIGINT)
  time.sleep(0.001)

def interrupts_and_goes_on(state, *_):
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(1.0)
  return state, []

for workers in (make_graph(firings=10**9, tamper=wrap(lambda name: True, before=interrupts)),
                [Worker('alone', interrupts_and_goes_on, None, [], [], 1)]):
  try:
    run(workers)
  except KeyboardInterrupt:
    print('interrupted', threading.active_count())
"""


def test_an_interrupt_of_the_main_thread_ends_the_workers():
  done = processes.run([sys.executable, '-c', INTERRUPTED])
  assert done.stdout.split() == ['interrupted', '1'] * 2, done.stderr[-4000:]
  assert done.returncode == 0
