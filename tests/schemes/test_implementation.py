"""Programs in a running loop: compilation, dispatch, transfers, and lowering to accelerators."""

import collections
import math
import re
import sys

import jax
import jax.export
import pytest

from benchmarks.compiled import recorded
from podracer_jit import loops
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.configs import apex_dpg_dmc, apex_dqn_atari, apex_dqn_catch, impala_atari
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.experiment import build, schema
from podracer_jit.learner import from_rollouts, updates
from podracer_jit.learner.learner import RolloutLearner
from podracer_jit.runtime import channels, placement
from tests.runs import changed, fresh, initial_state, prepared, run, small
from tests.schemes import test_islands
from tests.tiers import essential
from tests.workers import not_writer, wrap

pytestmark = pytest.mark.implementation


def test_nothing_is_compiled_within_a_segment():
  config = changed(small(), scheme='cleanba', env__renew_every_updates=0)
  compiled = []

  def watch(call, *_):
    if call.number == 3:  # by then every program has run once, in spite of the lag
      jax.monitoring.register_event_duration_secs_listener(listen)

  def listen(event, duration, **kwargs):
    if 'backend_compile' in event:
      compiled.append(event)

  try:
    run(config, updates=8, tamper=wrap('learner', before=watch))
    assert not compiled
    jax.jit(lambda x: x * 3.25)(1.5)
    assert compiled  # the listener works
  finally:
    jax.monitoring.clear_event_listeners()

@pytest.mark.parametrize('fields', [
    {}, dict(scheme='fused', replay__priority_exponent=0.0), dict(replay__evict_every=2),
    dict(replay__eviction='prioritised', replay__evict_every=2)], ids=str)
def test_no_update_copies_the_replay(fields):
  """Additions and gradient steps change it in place."""
  config = changed(apex_dqn_catch.get_config('smoke').to_dict(), **fields)
  config['replay']['capacity'] = 20_000  # more numbers than any batch or network here has
  prepared_run = fresh(config)
  jax.clear_caches()
  with recorded() as texts:
    run(None, updates=2, prepared_run=prepared_run)
  programs = [text for text in texts if '/storing/' in text]
  copied = re.findall(r'(\w+\[[\d,]+\])\S* copy\(', ''.join(programs))
  assert copied  # of small arrays
  assert not [shape for shape in copied
              if math.prod(map(int, re.findall(r'\d+', shape.partition('[')[2]))) >= 20_000]


@pytest.mark.parametrize('scheme', ['sync', 'cleanba', 'fused', 'apex_lockstep'])
def test_programs_are_dispatched_without_python(scheme):
  """JAX dispatches all but the first calls in C++, unless a program has effects."""
  config = apex_dqn_catch.get_config().to_dict() if scheme == 'apex_lockstep' else small()
  config = changed(config, scheme=scheme, placement__updates_per_call=1,
                   env__renew_every_updates=0)
  calls_of = collections.defaultdict(list)

  def profiled(call, *args):
    files = []
    calls_of[call.worker].append(files)
    sys.setprofile(lambda frame, event, arg: files.append(frame.f_code.co_filename))
    try:
      return call.fire(*args)
    finally:
      sys.setprofile(None)

  run(config, updates=8, tamper=wrap(not_writer, instead=profiled), prepared_run=fresh(config))
  assert {name.split()[0] for name in calls_of} >= ({'learner'} if scheme == 'fused' else
                                                    {'actor', 'learner'})
  for name, calls in calls_of.items():
    by_python = [sum(file.endswith('interpreters/pxla.py') for file in call) for call in calls]
    assert by_python[0] and len(calls) == 8
    assert not any(by_python[3:]), f'{name}: {by_python}'


@pytest.mark.full
@pytest.mark.parametrize('module', [impala_atari, apex_dqn_atari, apex_dpg_dmc])
def test_programs_can_be_lowered_for_gpus(module):
  """Rollouts for CUDA contain EnvPool's calls with side effects; learning has no custom call."""
  config = module.get_config('smoke').to_dict()
  config['env']['num_envs'] = 16
  config['num_grad_shards'] = 4
  config['placement'] |= schema.ONE_DEVICE  # else `learn` would be the part of one device
  fresh_run = fresh(config)
  shards = config['num_shards']
  experiment = fresh_run.experiment
  rollout_program = RolloutProgram([
      envpool_envs.EnvPoolVectorEnv(experiment.env.task, experiment.env_options,
                                    env_seeds(1, 0, i, 16 // shards)) for i in range(shards)])
  keys = [jax.random.key(i) for i in range(shards)]
  train_state = initial_state(fresh_run)
  actor_state = fresh_run.acting.initial_state(rollout_program.vector_envs, keys, 0)
  traced = jax.jit(fresh_run.acting.rollout(rollout_program.vector_envs)).trace(
      fresh_run.learner.algorithm.for_actors(train_state), actor_state)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  rollout_program.close()
  calls = re.findall(
      r'custom_call @\w+_(\w+)\(.*has_side_effect = (\w+).*handle = (\d+)', text)
  assert len({address for _, _, address in calls}) == shards
  assert {tuple(kind) for *kind, _ in calls} == {('recv', 'true'), ('send', 'true')}
  assert text.count('custom_call') == len(calls)
  rollout = jax.eval_shape(from_rollouts.concatenate, traced.out_info[1])
  learn = jax.jit(fresh_run.learner.learn).trace(train_state, rollout).lower(
      lowering_platforms=('cuda',))
  assert 'stablehlo.while' in learn.as_text() and 'custom_call' not in learn.as_text()


def test_only_channels_transfer_arrays(monkeypatch):
  """In a running loop only channels call device_put, once for each value."""
  inside = []
  outside = []
  values = []
  depth = []
  real_put = jax.device_put
  real_moved = channels.DoubleBuffer._moved

  def device_put(*args, **kwargs):
    (inside if depth else outside).append(1)
    return real_put(*args, **kwargs)

  def moved(self, item):
    depth.append(1)
    values.append(self.name)
    try:
      return real_moved(self, item)
    finally:
      depth.pop()

  config = changed(small(), placement__learner_devices=(1,))
  prepared_run = prepared(config)
  state = initial_state(prepared_run)
  with build.segment(prepared_run, build.Snapshot(state), 5, lambda report: None) as segment:
    monkeypatch.setattr(jax, 'device_put', device_put)
    monkeypatch.setattr(channels.DoubleBuffer, '_moved', moved)
    with jax.transfer_guard('disallow'):  # it has an effect only on GPUs
      loops.run_serial(segment.workers)
  assert not outside
  assert values.count('rollouts of actor 0') == 5
  assert values.count('parameters for actor 0') == 4  # nobody would read the last version
  assert len(inside) == 5 + 4


def _learner_arguments(prepared_run):
  """Returns the shapes of the learner's arguments."""
  arguments = []

  def look(call, carry, *batch):
    rollout = placement.gather([item.value for item in batch], prepared_run.place.mesh)
    arguments.append(jax.eval_shape(lambda *args: args, carry.train, rollout))

  run(None, updates=1, prepared_run=prepared_run, tamper=wrap('learner', before=look))
  return arguments[0]


@pytest.mark.parametrize('case', essential(test_islands.CASES, 'dqn'))
def test_learners_are_lowered_for_accelerators(case):
  """Learning, and G and U apart, can be lowered for CUDA and TPUs, without calls for CPUs."""
  fresh_run = fresh(test_islands.CASES[case][0]())
  learner = fresh_run.learner
  platforms = ('cuda', 'tpu')
  state, rollout = _learner_arguments(fresh_run)

  def text(function, *args):
    exported = jax.export.export(jax.jit(function), platforms=platforms)(*args)
    assert exported.platforms == platforms
    return exported.mlir_module()

  texts = [text(learner.learn, state, rollout)]
  if isinstance(learner, RolloutLearner):
    programs = learner.gradient_programs(fresh_run.place.mesh, 1)
    view = updates.view(state)
    prepared = jax.eval_shape(programs.prepare, view, state.key, rollout)
    step = jax.ShapeDtypeStruct((), int)
    sums = jax.eval_shape(programs.gradient, view, prepared, step)
    texts += [text(programs.gradient, view, prepared, step),
              text(learner.update_programs.step, state, sums),
              text(programs.prepare, view, state.key, rollout)]
  for lowered in texts[:3]:  # the fourth program, `prepare`, is empty for IMPALA
    assert 'optimization_barrier' in lowered
  for lowered in texts:
    assert not re.findall(r'custom_call @(?!Sharding|SPMD)\w+', lowered)
