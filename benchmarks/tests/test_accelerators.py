"""The programs of trainings compile for GPUs and TPUs, without what these are slow at.

They need the extra `accelerators` of setup.cfg: compilers of 0.5 GB, and Python 3.12 or newer.
`scripts/test --accelerators` makes an environment that has it, and runs them there.
"""

import re

import pytest

from benchmarks.accelerators import chips

pytestmark = [pytest.mark.skipif(not chips.are_known(), reason='scripts/test --accelerators'),
              pytest.mark.full]

if chips.are_known():
  chips.prepare()

# ruff: noqa: E402 - the compilers read their settings first

from benchmarks.accelerators import programs
from benchmarks.compiled import kernels, launches
from tests.runs import changed, small

MESHES = [('cuda', 1), ('cuda', 2), ('tpu', 1), ('tpu', 2)]
ON_ONE_DEVICE = dict(placement__auto=False, placement__actor_devices=(0,),
                     placement__learner_devices=(0,))


def config_of(*args, **fields):
  return changed(small(*args), **ON_ONE_DEVICE, **fields)


CARTPOLE = 'gymnax:CartPole-v1'
REPLAY = dict(num_minibatches=1, num_grad_shards=2, replay__capacity=256, replay__batch_size=16,
              replay__min_size=16)
CASES = {
    'impala': config_of('impala', 'Pong-v5', 'impala_resnet', num_grad_shards=2),
    'ppo': config_of('ppo', CARTPOLE, num_grad_shards=2),
    'ppo with a core': config_of('ppo', CARTPOLE, num_grad_shards=2, network__core='lstm',
                                 network__core_size=8),
    'pqn': config_of('pqn', CARTPOLE, num_grad_shards=2),
    'dqn': config_of('dqn', CARTPOLE, **REPLAY),
    'r2d2': config_of('r2d2', CARTPOLE, **REPLAY, network__core='gru', network__core_size=8,
                      loss__burn_in=2, loss__trace_length=8),
    'sac': config_of('sac', 'gymnax:Pendulum-v1', **REPLAY),
    'td3': config_of('td3', 'gymnax:Pendulum-v1', **REPLAY),
    'dpg': config_of('dpg', 'gymnax:Pendulum-v1', 'deterministic', **REPLAY),
}


# A TPU cannot call EnvPool's simulators; they run on the host's CPU.
ROLLOUTS = [(name, platform) for name, config in CASES.items() for platform in chips.PLATFORMS
            if platform == 'cuda' or ':' in config['env']['task']]


def compiled(lowered):
  return lowered.compile().as_text()


def check(text):
  """Checks that a program calls nothing of Python, as GPUs and as TPUs write it."""
  assert not re.search(r'custom_call_target="[^"]*python[^"]*callback', text)
  assert 'is_host_transfer=true' not in text


@pytest.mark.parametrize('name, platform', ROLLOUTS)
def test_a_rollout_compiles_without_a_conditional(name, platform):
  with programs.of(CASES[name], chips.devices(platform, 1)) as of:
    text = compiled(of.rollout())
  check(text)
  assert ' conditional(' not in text


@pytest.mark.parametrize('platform, count', MESHES)
@pytest.mark.parametrize('name', CASES)
def test_an_update_compiles(name, platform, count):
  with programs.of(CASES[name], chips.devices(platform, count)) as of:
    check(compiled(of.learner()))


def test_a_rollout_of_the_first_environments_that_are_ready_compiles():
  config = config_of('impala', 'Pong-v5', 'nature_cnn', env_batch=4, scheme='impala')
  with programs.of(config, chips.devices('cuda', 1)) as of:
    check(compiled(of.rollout()))


@pytest.mark.parametrize('platform, count', MESHES)
@pytest.mark.parametrize('name', ['ppo', 'dqn'])
def test_rollouts_and_updates_compile_as_one_program(name, platform, count):
  with programs.of(changed(CASES[name], num_shards=2), chips.devices(platform, count)) as of:
    check(compiled(of.fused()))


@pytest.mark.parametrize('platform', chips.PLATFORMS)
def test_several_seeds_compile_as_one_program(platform):
  with programs.of(CASES['ppo'], chips.devices(platform, 1)) as of:
    check(compiled(of.seeds(3)))


@pytest.mark.parametrize('platform, count', MESHES)
def test_gradients_and_updates_compile_as_separate_programs(platform, count):
  with programs.of(changed(CASES['ppo'], scheme='dppo'), chips.devices(platform, count)) as of:
    for lowered in of.gradients():
      check(compiled(lowered))


@pytest.mark.parametrize('platform', chips.PLATFORMS)
@pytest.mark.parametrize('name', ['impala', 'ppo with a core', 'sac'])
def test_an_exported_agent_compiles(name, platform):
  with programs.of(CASES[name], chips.devices(platform, 1)) as of:
    for lowered in of.exported(16):
      check(compiled(lowered))


@pytest.mark.parametrize('platform', chips.PLATFORMS)
@pytest.mark.parametrize('name', ['dqn', 'r2d2'])
def test_a_replay_compiles_in_two_programs(name, platform):
  with programs.of(CASES[name], chips.devices(platform, 1)) as of:
    check(compiled(of.insert()))
    check(compiled(of.draw()))


@pytest.mark.parametrize('name, platform', [case for case in ROLLOUTS
                                            if case[0] in ('ppo', 'dqn', 'impala')])
def test_islands_have_equal_kernels_in_one_program_and_in_two(name, platform):
  with programs.of(CASES[name], chips.devices(platform, 1)) as of:
    together = kernels(compiled(of.fused()))
    apart = kernels(compiled(of.rollout())) | kernels(compiled(of.learner()))
  assert {'decision', 'gradient', 'update'} <= together.keys()
  assert together == apart


@pytest.mark.parametrize('platform, count', MESHES)
def test_islands_have_equal_kernels_in_workers_of_gradients(platform, count):
  with programs.of(changed(CASES['ppo'], scheme='dppo'), chips.devices(platform, count)) as of:
    whole = kernels(compiled(of.learner()))
    _, gradient, *_ = map(compiled, of.gradients())
  apart = kernels(gradient)['gradient']
  assert len(apart) == len(whole['gradient']) > 10
  # On two TPUs the last layer has another layout, in two kernels; docs/exactness.md says so.
  others = 2 if (platform, count) == ('tpu', 2) else 0
  assert len(apart - whole['gradient']) == others


@pytest.mark.parametrize('precision, expected', [('highest', True), ('default', False)])
def test_products_have_the_precision_of_the_config(precision, expected):
  config = changed(CASES['ppo'], numerics__precision=precision)
  with programs.of(config, chips.devices('cuda', 1)) as of:
    text = of.learner().as_text()
  products = [line for line in text.splitlines() if 'dot_general' in line]
  assert products and all(('HIGHEST' in line) == expected for line in products)


def test_returns_over_many_steps_launch_few_kernels():
  per_update = {}
  for length in (64, 512):
    config = changed(CASES['ppo'], unroll_length=length, num_minibatches=1)
    with programs.of(config, chips.devices('cuda', 1)) as of:
      per_update[length] = launches(compiled(of.learner()))
  # A loop of one step a turn would launch a kernel or more for each of 448 further steps.
  assert per_update[512] - per_update[64] < 100


def test_pooling_is_xlas_own():
  with programs.of(CASES['impala'], chips.devices('cuda', 1)) as of:
    text = compiled(of.learner())
  assert 'select-and-scatter' in text or 'cudnn$pooling' in text or 'reduce-window' in text


def test_launches_of_loops_and_branches_by_hand():
  text = """HloModule jit_f

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%p), index=1
  %y = f32[4] fusion(%x), kind=kLoop, calls=%inner
  ROOT %t = (s32[], f32[4]) tuple(%x, %y)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %t = (s32[], f32[4]) while(%x), condition=%condition, body=%body, TURNS
  %w = (s32[], f32[4]) while(%x), condition=%condition, body=%body
  ROOT %z = f32[4] custom-call(%x), custom_call_target="__cublas$gemm"
}
"""
  turns = 'backend_config={"known_trip_count":{"n":"20"}}'
  assert launches(text.replace('TURNS', turns)) == 20 + 1 + 1


def test_a_kernel_may_return_its_results_in_another_order():
  def text(shape, *results):
    return f"""HloModule jit_f

%inner (p: f32[4], q: s32[4]) -> {shape} {{
  %p = f32[4] parameter(0)
  %q = s32[4] parameter(1)
  %a = f32[4] add(%p, %p)
  %b = s32[4] multiply(%q, %q)
  ROOT %t = {shape} tuple({', '.join(results)})
}}

ENTRY %main (x: f32[4], y: s32[4]) -> {shape} {{
  %x = f32[4] parameter(0)
  %y = s32[4] parameter(1)
  ROOT %f = {shape} fusion(%x, %y), kind=kLoop, calls=%inner, metadata={{op_name="island_u/y"}}
}}
"""

  one = kernels(text('(f32[4], s32[4])', '%a', '%b'))
  assert one.keys() == {'u'}
  assert one == kernels(text('(s32[4], f32[4])', '%b', '%a'))
  assert one != kernels(text('(s32[4], f32[4])', '%b', '%p'))


def test_kernels_of_a_tpu_differ_in_the_order_of_sums_alone():
  def text(opcode, memory, cycles, bounds):
    config = (f'{{"flag_configs":[],"window_config":{{"input_window_bounds":["{bounds}"],'
              f'"estimated_cycles":"{cycles}"}},"aliasing_operands":{{"lists":[]}}}}')
    return f"""HloModule jit_f

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0:T(128)}} parameter(0)
  ROOT %y = f32[4]{{0:T(128){memory}}} {opcode}(%x, %x), metadata={{op_name="island_update/y"}}, \
backend_config={config}
}}
"""

  def of(*args):
    return kernels(text(*args))

  for opcode in ('add', 'convolution'):
    assert of(opcode, '', 10, 1) == of(opcode, 'S(1)', 20, 1) != {}
  assert of('add', '', 10, 1) == of('add', '', 10, 2)
  assert of('convolution', '', 10, 1) != of('convolution', '', 10, 2)
