"""Workers on threads give what the same workers give one by one, and end whatever happens."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from podracer_jit import loops
from podracer_jit.loops import Endpoint, Worker, run, run_serial
from podracer_jit.runtime.channels import Closed, DoubleBuffer, FifoQueue, Versioned
from tests.workers import not_writer, wrap

HANG_S = 60  # a guard: nothing here takes so long


def ended(function, within_s=HANG_S):
  """Returns or raises what `function` does; fails where it does not end."""
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


def graph(lag=0, actors=2, firings=20, nap=lambda: None, every=1, until=lambda state: False,
          tamper=lambda workers: workers):
  """Actors, a learner and a writer, as a training run has them; states are what each has seen.

  Arithmetic that does not commute, so that another order or lag gives other numbers. An actor gets
  new parameters, and the writer a report, at every `every`-th firing.
  """
  gets = -(-firings // every)
  params = [DoubleBuffer(f'parameters {i}', gets, lag) for i in range(actors)]
  made = [DoubleBuffer(f'rollouts {i}', firings) for i in range(actors)]
  reports = DoubleBuffer('reports', firings // every)
  for channel in params:
    channel.prime(Versioned(1, 0))

  def actor(i):
    def fire(seen, params):
      nap()
      made = (params.value * 31 + len(seen) * 7 + i) % 10007
      return (*seen, (made, params.version)), [Versioned(made, params.version)]
    return fire

  def learner(seen, *batch):
    nap()
    value = 17
    for item in batch:
      value = (value * 13 + item.value) % 10007
    item = Versioned(value, len(seen) + 1)
    return (*seen, (value, *(len(seen) - b.version for b in batch))), [item] * (actors + 1)

  def writer(seen, report):
    nap()
    return (*seen, report), []

  def worker(name, fire, reads, writes, firings, **more):
    return Worker(name, fire, (), reads, writes, firings, **more)

  return tamper([
      *(worker(f'actor {i}', actor(i), [Endpoint(params[i], every)], [Endpoint(made[i])], firings)
        for i in range(actors)),
      worker('learner', learner, [Endpoint(m) for m in made],
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
def test_threads_give_what_one_thread_gives(lag, actors, every):
  serial = ended(lambda: run_serial(graph(lag, actors, every=every)))
  assert {name: len(seen) for name, seen in serial.items()} == {
      **{f'actor {i}': 20 for i in range(actors)}, 'learner': 20, 'writer': 20 // every}
  for seed in range(3):
    threaded = ended(lambda s=seed: run(graph(lag, actors, every=every, nap=random_naps(s))))
    assert threaded == serial


@pytest.mark.quick
@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
def test_lags_are_0_then_exactly_the_schemes(runner, lag):
  seen = ended(lambda: runner(graph(lag)))['learner']
  assert [lags for _, *lags in seen] == [[0, 0]] + [[lag, lag]] * 19


def test_a_port_is_used_once_in_every_firings():
  """A reader gets at the first of them and keeps the value, a writer puts at the last."""
  source, sink = DoubleBuffer('source', 3), DoubleBuffer('sink', 3)
  workers = [
      Worker('maker', lambda n: (n + 1, [Versioned(n, n)]), 0, [], [Endpoint(source)], 3),
      Worker('user', lambda seen, item: ((*seen, item.value), [Versioned(len(seen), 0)]), (),
             [Endpoint(source, 4)], [Endpoint(sink, 4)], 12),
      Worker('end', lambda seen, item: ((*seen, item.value), []), (), [Endpoint(sink)], [], 3)]
  states = ended(lambda: run(workers))
  assert states['user'] == (0,) * 4 + (1,) * 4 + (2,) * 4
  assert states['end'] == (3, 7, 11)


def test_none_is_not_put():
  channel = DoubleBuffer('odd numbers', 3)
  workers = [
      Worker('maker', lambda n: (n + 1, [Versioned(n, n) if n % 2 else None]), 0, [],
             [Endpoint(channel)], 6),
      Worker('taker', lambda seen, item: ((*seen, item.value), []), (), [Endpoint(channel)], [], 3)]
  assert ended(lambda: run(workers))['taker'] == (1, 3, 5)


class Computed:
  """A value as jax.block_until_ready sees it: waits for `ready`."""

  def __init__(self, ready):
    self.block_until_ready = ready


def test_a_worker_fires_on_what_is_not_computed_and_again_once_its_own_is():
  """Values are computed once the next in the ring has fired: whoever waited sooner would hang."""
  fired = {name: [threading.Event() for _ in range(6)] for name in ('actor 0', 'learner')}
  computed = []

  def firing(call, seen, *inputs):
    name, k = call.worker, len(seen)
    after = 'learner' if name == 'actor 0' else 'actor 0'
    assert computed.count(name) == k
    fired[name][k].set()
    at = k if name == 'actor 0' else k + 1  # the learner's k-th is for the actor's next

    def ready():
      assert at == 5 or fired[after][at].wait(HANG_S)
      computed.append(name)

    seen, (item, *others) = call.fire(seen, *(x._replace(value=x.value[0]) for x in inputs))
    return seen, [item._replace(value=(item.value, Computed(ready))), *others]

  workers = graph(actors=1, firings=5, tamper=wrap(not_writer, instead=firing))
  workers[0].reads[0].channel.prime(Versioned((1,), 0))
  states = ended(lambda: run(workers))
  assert states == ended(lambda: run_serial(graph(actors=1, firings=5)))
  assert computed.count('actor 0') == 5


@pytest.mark.parametrize('call', [lambda value: None, lambda value: value.block_until_ready()])
def test_who_needs_a_value_waits_for_it_and_who_computes_it_does_not(call):
  """Also where it is the call of a program that waits, as of one for several CPU devices."""
  first, second = DoubleBuffer('first', 3), DoubleBuffer('second', 3)
  begun = [threading.Event() for _ in range(3)]

  def make(n):
    def slow():  # computed 0.1 s after its user has begun to wait, however late that is
      assert begun[n].wait(HANG_S)
      time.sleep(0.1)
    return n + 1, [Versioned(Computed(slow), n)]

  def use(n, item):
    begun[n].set()
    call(item.value)
    return n + 1, [Versioned(n, n)]

  ended(lambda: run([
      Worker('maker', make, 0, [], [Endpoint(first)], 3),
      Worker('user', use, 0, [Endpoint(first)], [Endpoint(second)], 3),
      Worker('end', lambda n, item: (n + 1, []), 0, [Endpoint(second)], [], 3)]))
  assert first.get_wait_s >= 0.3
  assert first.put_wait_s < first.get_wait_s / 2


# Ends.


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
def test_until_ends_all_and_the_writer_still_drains(runner, lag):
  def last_goes_on(call, seen, *batch):  # puts no parameters that nobody will use
    seen, (*params, report) = call.fire(seen, *batch)
    return seen, [None if len(seen) == 7 else p for p in params] + [report]

  def tamper(workers):
    workers = wrap('learner', instead=last_goes_on)(workers)
    return wrap('writer', before=lambda *_: time.sleep(0.02))(workers)

  whole = ended(lambda: run_serial(graph(lag)))
  states = ended(lambda: runner(graph(lag, until=lambda seen: len(seen) == 7, tamper=tamper)))
  assert states['learner'] == whole['learner'][:7]
  assert states['writer'] == whole['writer'][:7]
  for i in range(2):  # an actor may be one rollout ahead
    made = states[f'actor {i}']
    assert made == whole[f'actor {i}'][:len(made)] and 7 <= len(made) <= 7 + lag


def reader_of_one_and_reader_of_all(value):
  """Returns a producer of `value(k)` for two readers, one of which ends before the second value.

  The producer has then put its second value to the other reader, which waits until it is computed.
  """
  closed = threading.Event()

  class ClosingBuffer(DoubleBuffer):
    def close(self):
      super().close()
      closed.set()

  lasting, ending = DoubleBuffer('lasting', 9), ClosingBuffer('ending', 9)
  turns = DoubleBuffer('turns', 9, 0)  # so that run_serial, too, ends the reader of one in time
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
def test_what_was_put_is_said_to_be_computed_though_another_reader_has_ended(runner):
  states = ended(lambda: runner(reader_of_one_and_reader_of_all(lambda k: k)))
  assert states == {'producer': 2, 'reader of one': 1, 'reader of all': (0, 1)}


class Boom(Exception):
  pass


@pytest.mark.parametrize('runner', [run, run_serial])
def test_a_computation_that_fails_after_another_reader_has_ended_is_raised(runner):
  """Its reader is not told that it is computed."""
  def ready():
    raise Boom('found out later')

  waited = []  # `until` is asked once the inputs are waited
  workers = [worker._replace(until=lambda versions: waited.append(versions))
             if worker.name == 'reader of all' else worker
             for worker in reader_of_one_and_reader_of_all(lambda k: Computed(ready) if k else k)]
  with pytest.raises(Boom, match='found out later'):
    ended(lambda: runner(workers))
  assert waited == [(0,)]


def fails(who, at=6):
  def fail(call, *_):
    if call.number == at:
      raise Boom(f'{who} has failed')
  return wrap(who, before=fail)


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('lag', [0, 1])
@pytest.mark.parametrize('who', ['actor 0', 'actor 1', 'learner', 'writer'])
def test_the_first_exception_ends_every_thread_and_is_raised(runner, lag, who):
  with pytest.raises(Boom, match=f'{who} has failed'):
    ended(lambda: runner(graph(lag, tamper=fails(who))))
  names = {worker.name for worker in graph()}
  assert not names & {t.name for t in threading.enumerate()}


def test_an_exception_while_others_wait_is_raised_and_not_their_closing():
  waiting = DoubleBuffer('never made', 1)
  def fire(seen):
    time.sleep(0.1)
    raise Boom('alone')

  workers = [Worker('waits', lambda seen, item: (seen, []), None, [Endpoint(waiting)], [], 1),
             Worker('fails', fire, None, [], [Endpoint(waiting)], 1)]
  with pytest.raises(Boom, match='alone'):
    ended(lambda: run(workers))
  with pytest.raises(Closed):
    waiting.get()


def test_an_exception_ends_workers_that_share_no_hand_off_with_it():
  def fire(seen):
    time.sleep(0.1)
    raise Boom('alone')

  endless = graph(firings=10**9, nap=lambda: time.sleep(1e-3))
  with pytest.raises(Boom, match='alone'):
    ended(lambda: run([*endless, Worker('fails', fire, None, [], [], 1)]))
  assert not {worker.name for worker in endless} & {t.name for t in threading.enumerate()}


@pytest.mark.parametrize('runner', [run, run_serial])
def test_an_error_of_what_was_started_is_raised(runner):
  """And not that somebody waited for it."""
  def ready():
    raise Boom('found out later')

  def starts(call, *args):
    seen, (item,) = call.fire(*args)
    return seen, [item._replace(value=Computed(ready)) if len(seen) == 5 else item]

  def learner(call, seen, *batch):
    return (*seen, 0), [Versioned(0, len(seen) + 1)] * 3

  workers = wrap('learner', instead=learner)(graph(tamper=wrap('actor 1', instead=starts)))
  with pytest.raises(Boom, match='found out later'):
    ended(lambda: runner(workers))


def let_go(release, name):
  """Ends what a Stuck run has left behind."""
  release.set()
  for thread in threading.enumerate():
    if thread.name == name:
      thread.join(HANG_S)


def test_threads_that_do_not_end_are_named():
  release = threading.Event()
  workers = wrap('actor 1', before=lambda *_: release.wait(HANG_S))(
      graph(tamper=fails('learner', at=1)))
  workers = [w._replace(reads=()) if w.name == 'learner' else w for w in workers]
  try:
    with pytest.raises(loops.Stuck, match=r'^actor 1 did not end within 0') as stuck:
      ended(lambda: run(workers, grace_s=0.2))
    assert isinstance(stuck.value.__cause__, Boom)
  finally:
    let_go(release, 'actor 1')


@pytest.mark.parametrize('where', ['wait_ready', 'put'])
def test_a_program_that_does_not_end_is_its_workers(where):
  """Whoever started it does not leave before it, so that the run knows."""
  release, begun = threading.Event(), threading.Event()
  never, slot = DoubleBuffer('never computed', 1), DoubleBuffer('slot', 2)
  never.put(Versioned(Computed(lambda: release.wait(HANG_S)), 0))
  slot.put(Versioned(0, 0))  # and never taken

  def start(state, *inputs):
    begun.set()
    return state, [Versioned(Computed(lambda: release.wait(HANG_S)), 0)]

  def fail(state):
    assert begun.wait(HANG_S)
    raise Boom('after it was started')

  reads, writes = [], [Endpoint(slot)]
  if where == 'wait_ready':
    reads, writes = [Endpoint(never)], [Endpoint(DoubleBuffer('made', 1))]
  try:
    with pytest.raises(loops.Stuck, match='^starts did not end within 0') as stuck:
      ended(lambda: run([Worker('starts', start, None, reads, writes, 1),
                         Worker('fails', fail, None, [], [], 1)], grace_s=0.2))
    assert isinstance(stuck.value.__cause__, Boom)
  finally:
    let_go(release, 'starts')


def test_what_must_be_computed_goes_after_what_is_ready_by_then():
  """A reader of computed values that is slow keeps nobody who has others to wait for."""
  uncomputed, computed = DoubleBuffer('early', 3), FifoQueue('computed', 1)
  maker = Worker('maker', lambda n: (n + 1, [Versioned(n, n)] * 2), 0, [],
                 [Endpoint(computed), Endpoint(uncomputed)], 3)
  third = threading.Event()
  def take(n, item):
    if n == 2:
      third.set()
    return n + 1, []

  def slow(state, item):  # one in its hands and one waiting: a third cannot be put
    return (*state, third.wait(HANG_S)), []

  states = ended(lambda: run([maker, Worker('taker', take, 0, [Endpoint(uncomputed)], [], 3),
                              Worker('slow', slow, (), [Endpoint(computed)], [], 3)]))
  assert states['slow'] == (True,) * 3


@pytest.mark.parametrize('runner', [run, run_serial])
@pytest.mark.parametrize('reads', [(0, 1), (1, 0)])
def test_a_deadlock_is_reported(runner, reads):
  """Two that wait for each other, with nothing primed."""
  channels = [DoubleBuffer(f'handoff {i}', 1) for i in range(2)]
  workers = [Worker(f'worker {i}', lambda seen, item: (seen, [item]), None, [Endpoint(channels[i])],
                    [Endpoint(channels[1 - i])], 1) for i in reads]
  said = f'^no worker can go on; still running: worker {reads[0]}, worker {reads[1]}$'
  with pytest.raises(RuntimeError, match=said):
    ended(lambda: runner(workers))
  assert not {'worker 0', 'worker 1'} & {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize('side', ['get', 'put'])
def test_who_waits_for_somebody_outside_the_graph_is_not_in_a_deadlock(side):
  channel = FifoQueue('handoff', 1)
  use = channel.get if side == 'put' else lambda: channel.put(Versioned('from outside', 0))
  worker = (Worker('writer', lambda n: (n + 1, [Versioned(n, n)]), 0, [], [Endpoint(channel)], 2)
            if side == 'put' else
            Worker('reader', lambda n, item: (n + 1, []), 0, [Endpoint(channel)], [], 1))
  outside = threading.Timer(0.5, use)  # `run` has looked several times by then
  outside.start()
  assert ended(lambda: run([worker]))[worker.name] == worker.firings
  outside.join(HANG_S)


def test_what_goes_round_while_run_looks_is_no_deadlock():
  """Each of two workers waits most of the time, but never both: `run` looks at one moment."""
  class SlowlyUnlocked(DoubleBuffer):
    @contextlib.contextmanager
    def locked(self):
      with super().locked() as blocked:
        yield blocked
      time.sleep(0.02)  # whoever looks at one channel after another finds the other one waiting

  def fire(n, item):
    time.sleep(0.02)
    return n + 1, [item]

  there, back = SlowlyUnlocked('there', 40, 0), SlowlyUnlocked('back', 40)
  there.prime(Versioned(0, 0))
  states = ended(lambda: run([Worker('one', fire, 0, [Endpoint(there)], [Endpoint(back)], 40),
                              Worker('other', fire, 0, [Endpoint(back)], [Endpoint(there)], 40)]))
  assert states == {'one': 40, 'other': 40}


class Large:
  """Something whose memory matters."""


def test_a_value_that_was_used_is_not_kept():
  made, alive = [], []

  def make(state, turn):
    alive.append(sum(value() is not None for value in made))
    value = Large()
    made.append(weakref.ref(value))
    return state, [Versioned(value, 0)]

  slot, turns = DoubleBuffer('values', 5), DoubleBuffer('turns', 5, 0)
  turns.prime(Versioned(None, 0))
  run_serial([Worker('maker', make, None, [Endpoint(turns)], [Endpoint(slot)], 5),
              Worker('user', lambda state, item: (state, [Versioned(None, 0)]), None,
                     [Endpoint(slot)], [Endpoint(turns)], 5)])
  assert alive == [0] * 5


INTERRUPTED = """
import os, signal, threading, time
from tests.test_loops import Worker, graph, run
from tests.workers import wrap

def interrupts(call, *_):
  if call.worker == 'learner' and call.number == 6:
    os.kill(os.getpid(), signal.SIGINT)
  time.sleep(0.001)

def interrupts_and_goes_on(state, *_):
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(1.0)
  return state, []

for workers in (graph(firings=10**9, tamper=wrap(lambda name: True, before=interrupts)),
                [Worker('alone', interrupts_and_goes_on, None, [], [], 1)]):
  try:
    run(workers)
  except KeyboardInterrupt:
    print('interrupted', threading.active_count())
"""


def test_an_interrupt_of_the_main_thread_ends_the_workers():
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  done = subprocess.run([sys.executable, '-c', INTERRUPTED], env=env, capture_output=True,
                        text=True, timeout=300,
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
  assert done.stdout.split() == ['interrupted', '1'] * 2, done.stderr[-4000:]
  assert done.returncode == 0
