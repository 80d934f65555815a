"""The table of schemes: the gradient delays of NAPPO, stalls and errors."""

import functools
import re
import threading
import time

import jax
import numpy as np
import pytest

from podracer_jit import loops
from podracer_jit.losses.algorithm import Aux
from podracer_jit.schemes.table import SCHEMES
from tests.runs import changed, prepared, run, small
from tests.tiers import essential
from tests.workers import not_writer, wrap

# Indices of the devices of actors and learners, with two workers for schemes of several.
PLACES = {
    'sync': ((0,), (0,)), 'fused': ((0,), (0,)), 'ppo': ((0,), (0,)), 'ddppo': ((0, 1), (0, 1)),
    'dppo': ((0, 1), (0, 1)), 'dppo_async': ((0, 1), (0, 1)), 'cleanba': ((0, 1), (2,)),
    'rapid': ((0, 1), (2, 3)), 'rapid_async': ((0, 1), (2, 3)), 'impala': ((0, 1), (2, 3))}
BLOCKING = [name for name, scheme in SCHEMES.items() if scheme.deterministic and not scheme.replay]
LAG = {'cleanba': 1, 'rapid': 1}
UPDATES = 4


def with_scheme(scheme, config, place=None):
  """Returns the config with a scheme, on the devices of PLACES or of `place`."""
  actors, learners = place or PLACES[scheme]
  return changed(config, scheme=scheme, placement__actor_devices=actors,
                 placement__learner_devices=learners)


@functools.cache
def _config(loss):
  """Returns a config with groups of 2,048 rows; XLA does not split smaller sums between threads."""
  config = small(loss, num_shards=2, num_grad_shards=2)
  config['env'] |= {'num_envs': 64, 'renew_every_updates': 0}
  config |= dict(unroll_length=64, num_minibatches=8, num_epochs=2 if loss == 'ppo' else 1)
  return config


@functools.cache
def run_once(scheme, loss, serial=False):
  runner = loops.run_serial if serial else loops.run
  return run(with_scheme(scheme, _config(loss)), runner, updates=UPDATES)


@pytest.mark.quick
def test_every_scheme_is_tested():
  """test_apex.py tests the schemes with a replay."""
  assert set(PLACES) | {'apex', 'apex_lockstep'} == set(SCHEMES)


@pytest.mark.parametrize('scheme', BLOCKING)
def test_delays_of_blocking_schemes_are_exact(scheme):
  """With 2 epochs of 8 minibatches the least delay is 7.5; a lag adds 16 after update 1."""
  reports = run_once(scheme, 'ppo')[1]
  cgd = [x for report in reports for x in report.cgd]
  assert cgd == [7.5] + [7.5 + 16 * LAG.get(scheme, 0)] * (UPDATES - 1)
  assert [x for report in reports for x in report.gud] == [0.0] * UPDATES


def _async(scheme, devices, updates, tamper=lambda workers: workers):
  """Returns the mean delays (cgd, gud) of each update's gradient steps."""
  config = changed(small('ppo', num_shards=len(devices), num_grad_shards=len(devices)),
                   num_epochs=2, env__renew_every_updates=0)
  reports = run(with_scheme(scheme, config, (devices, devices)), updates=updates, tamper=tamper)[1]
  return np.array([(report.cgd[0], report.gud[0]) for report in reports]).T


@pytest.mark.parametrize('scheme, devices', essential([
    ('dppo_async', (0,)), ('rapid_async', (0, 1)), ('dppo_async', (0, 0, 0, 0))], 'rapid_async'))
def test_the_mean_gradient_delay_is_the_number_of_other_workers(scheme, devices):
  """Each of W workers computes one gradient at a time, so W - 1 gradients come before it."""
  barrier = threading.Barrier(len(devices))
  begun = set()

  def together(call, *_):
    # On a busy machine a worker could else make all its gradients before another begins.
    if call.worker not in begun:
      begun.add(call.worker)
      barrier.wait(60)

  cgd, gud = _async(scheme, devices, 40 * len(devices), wrap('worker', before=together))
  # The GUD of a gradient counts those of other workers since the last one of its worker.
  assert gud.mean() == pytest.approx(len(devices) - 1, rel=0.1)
  assert (gud >= 0).all() and (cgd >= 1.5).all()
  assert len(devices) > 1 or (cgd == 1.5).all()


def test_a_slow_worker_has_a_large_delay_and_the_mean_is_unchanged():
  """Worker 1 makes four gradients for one of worker 0; the order depends on no clock."""
  fired = {0: 0, 1: 0}
  turn = threading.Condition()
  may_go = {0: lambda: fired[1] >= 4 * (fired[0] + 1), 1: lambda: fired[1] < 4 * (fired[0] + 1)}

  def wait(call, *_):
    with turn:  # the timeout is for the end, when the other worker has finished
      turn.wait_for(may_go[int(call.worker[-1])], timeout=2)

  def count(call, *_):
    with turn:
      fired[int(call.worker[-1])] += 1
      turn.notify_all()

  _, gud = _async('dppo_async', (0, 0), 80, wrap('worker', before=wait, after=count))
  assert 3 <= gud.max() <= 5
  assert gud.mean() == pytest.approx(1, rel=0.15)


def test_workers_of_gradients_neither_get_nor_send_the_optimizers_state():
  views = []
  messages = []
  config = with_scheme('dppo_async', small('ppo', num_shards=2, num_grad_shards=2))
  run(config, updates=4, tamper=wrap(
      'worker', before=lambda call, carry, *inputs: views.append(inputs[-1].value),
      after=lambda call, carry, outputs: messages.append(outputs[0].value)))
  assert len(views) == len(messages) > 0
  for view, message in zip(views, messages, strict=True):
    assert view.opt_state is view.key is view.replay is None
    grads, aux = message.sums
    assert jax.tree.structure(grads) == jax.tree.structure(view.params)
    assert isinstance(aux, Aux) and aux.priority is None


def test_a_slow_learner_changes_the_delays_of_impala_alone():
  """Cleanba's figure 2: only where actors do not wait, their rollouts are older."""
  delays = {}
  receipts = {}
  for scheme in ('cleanba', 'impala'):
    for delay_s in (0.0, 0.2):
      config = changed(with_scheme(scheme, small()), placement__learner_delay_s=delay_s,
                       num_minibatches=1, num_shards=2, num_grad_shards=2)
      # Without a delay the actors are slow, so that none is ahead of the learner.
      tamper = wrap('actor', before=lambda *_, s=0.2 - delay_s: time.sleep(s))
      began_s = time.monotonic()
      receipts[scheme, delay_s], reports, _ = run(config, updates=6, tamper=tamper)
      assert time.monotonic() - began_s >= 6 * 0.2
      delays[scheme, delay_s] = [report.cgd[0] for report in reports]
  assert receipts['cleanba', 0.0] == receipts['cleanba', 0.2]
  assert delays['cleanba', 0.0] == delays['cleanba', 0.2] == [0.0, *[1.0] * 5]
  # Rollouts wait in the queue while the learner does.
  assert np.mean(delays['impala', 0.2][3:]) > np.mean(delays['impala', 0.0][3:]) + 0.4


@pytest.mark.parametrize('vtrace', [False, True])
def test_impala_learns_on_while_an_actor_is_stalled(vtrace):
  """The learner continues with the rollouts of the other actor."""
  config = changed(_config('ppo'), loss__vtrace=vtrace, num_epochs=1)
  stalled = threading.Event()

  def stall(call, state, params):
    if params.version > 0:
      stalled.set()
      time.sleep(0.3)

  receipts, reports, state = run(with_scheme('impala', config), updates=8,
                                 tamper=wrap('actor 1', before=stall))
  assert stalled.is_set() and int(state.update) == 8 and len(set(receipts)) == 8
  cgd = np.array([report.cgd[0] for report in reports])
  assert cgd[0] == 3.5 and cgd.max() >= 3.5 + 8
  assert all(report.gud == (0.0,) for report in reports)


@pytest.mark.parametrize('scheme, name', essential([
    ('dppo', 'learner'), ('rapid', 'actor 1'), ('rapid_async', 'learner'),
    ('dppo_async', 'worker 1'), ('impala', 'actor 0'), ('impala', 'learner')], 'rapid', 'impala'))
def test_the_first_exception_of_any_worker_ends_the_run(scheme, name):
  fired = {}

  def fail(call, *_):
    if call.worker == name and call.number == 3:
      for has_fired in fired.values():  # a worker that still compiles cannot end in time
        assert has_fired.wait(120)
      raise ArithmeticError(name)

  def tamper(workers):
    fired.update({w.name: threading.Event() for w in workers if not_writer(w.name)})
    return wrap(not_writer, before=fail, after=lambda call, *_: fired[call.worker].set())(workers)

  config = with_scheme(scheme, small('impala', num_shards=2, num_grad_shards=2))
  with pytest.raises(ArithmeticError, match=name):
    run(config, functools.partial(loops.run, grace_s=10.0), updates=10**6, tamper=tamper)


@pytest.mark.parametrize('fields, message', [
    (dict(scheme='ppo', placement__learner_devices=(0, 1)),
     'placement.learner_devices: scheme = ppo is on one device'),
    (dict(scheme='fused', placement__actor_devices=(0, 1)),
     'placement.actor_devices: scheme = fused is on one device'),
    (dict(scheme='dppo', placement__learner_devices=(1,), placement__actor_devices=(0,)),
     'scheme: dppo makes rollouts where it makes gradients'),
    (dict(scheme='ddppo', placement__actors_per_device=2), 'with an actor each'),
    (dict(scheme='rapid', exact_reduce=False), 'exact_reduce: rapid always adds in a fixed order'),
    (dict(scheme='rapid_async', placement__actor_devices=(0,), placement__learner_devices=(0, 1)),
     'placement.actor_devices: 1 actor cannot be split evenly by 2 workers ('
     'learner_devices = (0, 1)); take a multiple of 2'),
    (dict(scheme='rapid', placement__learner_devices=(1, 1)),
     'placement.learner_devices: names a device twice'),
    (dict(scheme='ddppo', placement__actor_devices=(1, 1)),
     'placement.actor_devices: names a device twice, got (1, 1)'),
    (dict(scheme='a3c'), "scheme: there is no 'a3c'; known are sync, cleanba")])
def test_fields_that_do_not_fit_a_scheme_are_refused(fields, message):
  config = changed(small('ppo', num_shards=2, num_grad_shards=2), **fields)
  with pytest.raises(ValueError, match=re.escape(message)):
    prepared(config)
