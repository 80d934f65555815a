"""The precision of products is that of the config; on CPUs it changes no bit."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiled import recorded
from podracer_jit.experiment.resolve import resolve
from podracer_jit.play.evaluation import Player
from tests.runs import changed, fresh, run, small


def precisions(texts):
  """Returns the precisions of all matrix products and convolutions in compiled programs."""
  products = [line for text in texts for line in text.splitlines()
              if re.search(r' = \S+ (dot|convolution)\(', line)]
  assert len(products) > 6
  return {(re.search(r'operand_precision=\{(\w+),\1\}', line) or ['', 'default'])[1]
          for line in products}


@pytest.mark.parametrize('config', [
    small('ppo'), small('impala', 'Pong-v5', 'nature_cnn'),
    changed(small('dqn'), num_minibatches=1, replay__batch_size=16, replay__min_size=16,
            replay__capacity=256)],
    ids=['ppo', 'impala', 'dqn'])
def test_all_products_of_a_training_have_the_precision_and_on_cpus_no_bit_changes(config):
  receipts = {}
  for precision in ('highest', 'default'):
    jax.clear_caches()
    with recorded() as texts:
      receipts[precision] = run(None, updates=3, prepared_run=fresh(
          changed(config, numerics__precision=precision)))[0]
    assert precisions(texts) == {precision}
  assert receipts['highest'] == receipts['default'] and receipts['highest']


def test_bfloat16_is_of_the_torso_alone_and_changes_bits():
  config = small('ppo')
  with_torso = run(changed(config, numerics__precision='bfloat16'), updates=3)[0]
  assert len({params for _, params in with_torso}) == 3
  assert not {params for _, params in with_torso} & {
      params for _, params in run(config, updates=3)[0]}


@pytest.mark.parametrize('precision', ['highest', 'default'])
def test_an_evaluation_has_it_too(precision):
  experiment = resolve(changed(small(), numerics__precision=precision))
  algorithm = experiment.algorithm
  params = algorithm.init(jax.random.key(0))
  player = Player(experiment.spec, {}, algorithm, params, jax.devices()[0], 1, 0, 0)
  program = jax.jit(lambda params, obs: player.act(
      params, obs, None, jnp.ones(2, bool), None).action)
  text = program.lower(params, np.zeros((2, 4), np.float32)).as_text()
  products = re.findall(r'dot_general.*?precision = \[(\w+), \w+\]', text)
  assert len(products) == 3 and set(products) == {precision.upper()}


def test_a_network_without_a_dtype_cannot_compute_in_bfloat16():
  config = changed(small('dpg', 'Pendulum-v1', 'deterministic'), numerics__precision='bfloat16')
  with pytest.raises(ValueError, match='^numerics.precision: bfloat16 needs a network with a field '
                                       'dtype; [A-Za-z]+ has none, so it must be highest or '):
    resolve(config)


def test_a_config_of_an_earlier_version_has_float32():
  config = small()
  del config['numerics']
  assert resolve(config).numerics.precision == 'highest'


KERNELS = """
import os, sys
import jax
from podracer_jit.runtime import host, machine
from podracer_jit.runtime.placement import PlacementOptions
machine.num_gpus = lambda: int(sys.argv[1])
if sys.argv[3] == 'started':
  jax.devices()
try:
  host.prepare_host(PlacementOptions(), deterministic=sys.argv[2] == 'True')
except ValueError as error:
  print(error)
print(os.environ.get('XLA_FLAGS'), jax.jit(lambda x: x + 1)(1))
"""
FLAG = '--xla_gpu_deterministic_ops'
UNMERGED = '--xla_gpu_dot_merger_threshold_mb=0'


@pytest.mark.parametrize('gpus, deterministic, own, expected', [
    (1, True, '', f'{FLAG}=true {UNMERGED} 2'), (1, False, '', ' 2'), (0, True, '', ' 2'),
    (2, True, '--xla_cpu_use_onednn=false',
     f'--xla_cpu_use_onednn=false {FLAG}=true {UNMERGED} 2'),
    (1, True, f'{FLAG}=false', f'{FLAG}=false {UNMERGED} 2'),
    (1, True, f'{UNMERGED} {FLAG}=false', f'{UNMERGED} {FLAG}=false 2')])
def test_repeatable_kernels_are_asked_for_before_jax_starts(gpus, deterministic, own, expected):
  assert _prepared(gpus, deterministic, '', own) == expected.strip()


def test_a_process_whose_jax_has_started_is_told_how_to_get_repeatable_kernels():
  told = _prepared(1, True, 'started', '')
  assert told.startswith('numerics.deterministic: True needs XLA_FLAGS="--xla_gpu_deterministic_ops'
                         '=true --xla_gpu_dot_merger_threshold_mb=0", and JAX has started in this '
                         'process without it; call podracer_jit.prepare(config)')
  assert _prepared(1, False, 'started', '') == _prepared(0, True, 'started', '') == '2'


def _prepared(gpus, deterministic, started, own):
  """Returns what a process prints that prepares JAX for so many GPUs."""
  done = subprocess.run(
      [sys.executable, '-c', KERNELS, str(gpus), str(deterministic), started], check=True,
      capture_output=True, text=True, timeout=300, env=os.environ | {'XLA_FLAGS': own})
  return done.stdout.strip()
