"""The benchmarks of processes, reductions and start-up: correct sums and JSON files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import common, reduction, scaling, startup
from benchmarks.tests.run import run_benchmark
from podracer_jit.experiment.resolve import resolve
from podracer_jit.numerics.deterministic import exact_sum, plain_sum
from tests.runs import small

CATCH = ['--config=configs/impala_catch.py:smoke', '--config.env.num_envs=16',
         '--config.unroll_length=5', '--config.log.tensorboard=False']
NAMES = ['scaling', 'reduction', 'startup']


def figures(path, name, *args):
  result = run_benchmark(name, *CATCH, f'--json={path}', *args)
  assert result.returncode == 0, result.stderr
  return json.loads(path.read_text()), result.stdout


def test_efficiency_is_computed_from_medians():
  result = scaling.efficiencies(dict(
      one=[[90.0], [100.0], [500.0]], together=[[120.0], [1.0], [150.0]],
      apart=[[70.0, 80.0], [10.0, 20.0], [90.0, 110.0]]), 2)
  assert result['efficiency'] == 120 / 200
  assert result['efficiency_to_control'] == 120 / 150
  assert result['control'] == 150 / 200
  assert result['layouts']['apart']['rounds'] == [150, 30, 200]


def test_each_process_has_the_work_of_the_config():
  config = resolve(small() | dict(num_shards=2, num_grad_shards=4)).fields
  scaled = scaling.scaled(resolve(config), 3).fields
  assert (scaled['env']['num_envs'], scaled['num_shards'], scaled['num_grad_shards']) == (24, 6, 12)
  assert config['env']['num_envs'] == 8
  changed = {name for name in scaled if scaled[name] != config[name]}
  assert changed == {'env', 'num_shards', 'num_grad_shards', 'total_steps', 'checkpoint'}


@pytest.mark.full
def test_processes_are_measured_with_one_core_each(tmp_path):
  if len(scaling.os.sched_getaffinity(0)) < 2:
    pytest.skip('two processes need a core each')
  result, out = figures(tmp_path / 'f.json', 'scaling', '--rounds=1', '--updates=2')
  layouts = result['layouts']
  runs = {layout: [len(runs) for runs in row['runs']] for layout, row in layouts.items()}
  assert runs == dict(together=[1], apart=[2], one=[1])
  for row in layouts.values():
    assert row['rounds'] == [sum(runs) for runs in row['runs']] and min(row['rounds']) > 0
    assert row['sps'] == pytest.approx(np.median(row['rounds'])) and f'{row["sps"]:,.0f}' in out
  assert result['efficiency'] == pytest.approx(
      layouts['together']['sps'] / (2 * layouts['one']['sps']))
  assert f'{result["efficiency_to_control"]:.3f}' in out and '0.93' in out


def test_a_process_is_pinned_to_its_core_and_its_parent_is_not(tmp_path, monkeypatch):
  """A stand-in for the command prints its cores and its platform."""
  before = scaling.os.sched_getaffinity(0)
  (tmp_path / 'podracer_jit.py').write_text(
      'import os, sys\n'
      'place = os.sched_getaffinity(0), os.environ["JAX_PLATFORMS"]\n'
      'print(*place, file=open(sys.argv[1], "w"), flush=True)\n'
      'import time; time.sleep(100)\n')
  monkeypatch.chdir(tmp_path)  # `python -m` looks here first
  with scaling.Runs() as runs:
    for core in before:
      runs.start(core, tmp_path / f'log{core}', f'where{core}')
    runs.wait({tmp_path / f'where{core}': 1 for core in before})
  for core in before:
    assert (tmp_path / f'where{core}').read_text() == f'{{{core}}} cpu\n'
  assert scaling.os.sched_getaffinity(0) == before
  assert all(process.returncode == -9 for process in runs._processes)


@pytest.mark.full
def test_a_failed_run_ends_the_benchmark():
  """`rapid_async` is for one process, which only the command itself checks."""
  result = run_benchmark('scaling', *CATCH, '--rounds=1', '--config.scheme=rapid_async')
  assert result.returncode == 2
  (line,) = result.stderr.strip().splitlines()
  assert line.startswith('scaling: exit code 2: podracer_jit: scheme: rapid_async is for one')


TREE = dict(a=jnp.zeros((2, 3)), b=jnp.zeros(4))  # 10 floats


MANY = dict(a=jnp.zeros((5, 1000)), b=jnp.zeros(1))  # 5001 floats, padded to 5004 or 5008


@pytest.mark.parametrize('tree, devices, by_hand', [
    (TREE, 1, (0, 0)), (TREE, 2, (40, 40)), (TREE, 4, (120, 60)),
    # Each of eight devices receives 7 times its eighth of the groups, then 7 eighths of the sum.
    (MANY, 4, (60_012, 30_006)), (MANY, 8, (7 / 8 * 3 * 20_032, 7 / 4 * 20_004))])
def test_bytes_by_hand_by_shapes_and_in_the_program_are_equal(tree, devices, by_hand):
  by_hand = dict(zip(('exact', 'plain'), by_hand, strict=True))
  numbers = sum(x.size for x in jax.tree.leaves(tree))
  assert reduction.bytes_by_shapes(numbers, 8, devices) == pytest.approx(by_hand)
  for name, sum_groups in (('exact', exact_sum), ('plain', plain_sum)):
    reduced = reduction.make_reduction(sum_groups, tree, 8, jax.devices()[:devices])
    counted = reduction.bytes_in_program(reduced.program.as_text(), devices)
    assert counted == pytest.approx(by_hand[name])
    sums = reduced.program(reduced.trees)
    jax.tree.map(lambda total, groups: np.testing.assert_allclose(
        total, np.sum(groups, axis=0), rtol=1e-4, atol=1e-5), sums, reduced.trees)


def test_all_groups_are_sent_if_they_cannot_be_added_locally():
  for tree, numbers, devices, floats in (
      (TREE, 10, 2, 3 * 10), (MANY, 5001, 2, 3 * 5001), (MANY, 5001, 4, 3 / 4 * (3 + 2) * 5004)):
    groups = 3 * devices
    reduced = reduction.make_reduction(exact_sum, tree, groups, jax.devices()[:devices])
    counted = reduction.bytes_in_program(reduced.program.as_text(), devices)
    expected = reduction.bytes_by_shapes(numbers, groups, devices)['exact']
    assert counted == 4 * floats == expected


@pytest.mark.parametrize('line, received', [
    ('%x = f32[8,10]{1,0} all-gather(%p), channel_id=1, dimensions={0}', 280),
    ('ROOT %x = (f32[8,2]{1,0}, /*index=1*/s16[8]{0}) all-gather(%p, %q), channel_id=1', 70),
    ('%x = (f32[1,10]{1,0}, f32[8,10]{1,0}) all-gather-start(%p), channel_id=1', 280),
    ('%x = pred[16]{0} all-reduce(%p), to_apply=%add', 28),
    ('%x = f64[] all-reduce-start(%p), to_apply=%add', 14),
    ('%x = f32[8,10]{1,0} all-gather-done(%y)', 0),
    ('%x = f32[8,10]{1,0} fusion(%p), calls=%all-gather', 0)])
def test_bytes_of_collectives_are_read_from_the_text_of_a_program(line, received):
  assert reduction.bytes_in_program(line, 8) == pytest.approx(received)


def test_the_fit_finds_the_line_and_the_residual():
  x = [0.0, 0.01, 0.03, 0.07]
  exact = reduction.fit(x, [0.002 + 5 * value for value in x])
  np.testing.assert_allclose(exact, [0.002, 5, 0], atol=1e-12)
  noisy = reduction.fit([0, 0, 1, 1], [1, 3, 4, 6])
  np.testing.assert_allclose(noisy, [2, 3, 1])


@pytest.mark.full
def test_reductions_are_measured_on_every_mesh(tmp_path):
  result, out = figures(tmp_path / 'f.json', 'reduction', '--seconds=0')
  assert [row['devices'] for row in result['rows']] == [1, 2, 4, 8]
  # The network has 7,684 parameters, padded to 7,688 for eight devices.
  received = {1: 0, 2: 7_684, 4: 3 * 7_684, 8: 7 / 8 * 3 * 7_688}
  for row in result['rows']:
    assert row['parameters'] == 7_684
    assert row['exact_mb'] == pytest.approx(row['exact_mb_by_shapes']) == pytest.approx(
        received[row['devices']] * 4 / 1e6)
    assert row['plain_mb'] == pytest.approx(row['plain_mb_by_shapes'])
    steps = result['config']['num_epochs'] * result['config']['num_minibatches']
    assert row['share'] == pytest.approx(steps * row['exact_ms'] / row['learner_ms'])
    assert row['extra'] == pytest.approx(
        row['share'] - steps * row['plain_ms'] / row['learner_ms'])
  assert set(result['fit']) == {'a_s', 'b_s_per_gb', 'residual_s'}
  assert 's/GB' in out and f'share {result["cores"]} cores' in out
  assert 'by the shapes' not in out


@pytest.mark.full
def test_the_start_is_measured_cold_and_warm(tmp_path):
  result, out = figures(tmp_path / 'f.json', 'startup', '--rounds=1', '--updates=2')
  assert list(result['kinds']) == ['cold', 'warm']
  for name, row in result['kinds'].items():
    rounds = row['rounds']
    for field in ('first_rollout_s', 'first_rollout_cpu_s', 'first_update_s', 'total_s'):
      assert len(rounds[field]) == 1 and row[field] == pytest.approx(np.median(rounds[field]))
    assert all(0 < a <= b for first, second in (('first_rollout_s', 'first_update_s'),
                                                ('first_update_s', 'total_s'))
               for a, b in zip(rounds[first], rounds[second], strict=True))
    assert f'\n{name} ' in out
  assert result['saved']['total_s'] == pytest.approx(
      result['kinds']['cold']['total_s'] - result['kinds']['warm']['total_s'])


def test_only_the_first_run_of_a_round_has_an_empty_cache(tmp_path, monkeypatch):
  """A stand-in for the command writes a program to its cache."""
  (tmp_path / 'podracer_jit/cli').mkdir(parents=True)
  (tmp_path / 'podracer_jit/cli/main.py').write_text(
      'import os, pathlib, sys, time, uuid\n'
      'def run():\n'
      '  workdir = pathlib.Path(sys.argv[2].partition("=")[2])\n'
      '  workdir.mkdir()\n'
      f'  file = pathlib.Path(os.environ["{startup.FILE}"])\n'
      '  file.write_text(f"{time.perf_counter()} 0.5")\n'
      '  (workdir / "metrics.jsonl").write_text("{}\\n")\n'
      '  cache = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])\n'
      '  (cache / f"{uuid.uuid4()}-cache").touch()\n')
  monkeypatch.chdir(tmp_path)
  for _ in range(2):
    cold, warm = startup.measure_round(resolve(small()))
    assert (cold.cached, warm.cached) == (1, 2)
    assert 0 < cold.first_rollout_s <= cold.first_update_s <= cold.total_s
    assert cold.first_rollout_cpu_s == 0.5


def test_a_written_config_file_has_the_same_values(tmp_path):
  config = small(task='Pong-v5', network='nature_cnn')
  path = common.write_config(tmp_path / 'config.py', config)
  namespace = {}
  exec(path.read_text(), namespace)
  assert namespace['get_config']().to_dict() == config


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('args, message', [
    (['--config=configs/nothing.py'], 'there is no such file'),
    ([*CATCH, '--config.num_minibatches=3'], 'num_minibatches'),
    (['--config=configs/apex_dqn_catch.py'], 'benchmarks.replay'),
    ([*CATCH, '--rouns=3'], 'rouns')])
def test_a_bad_command_is_refused_in_one_line(name, args, message, capsys):
  module = dict(scaling=scaling, reduction=reduction, startup=startup)[name]
  before = scaling.signal.getsignal(scaling.signal.SIGTERM)
  try:
    assert module.benchmark([f'benchmarks.{name}', *args]) == 2
  finally:
    scaling.signal.signal(scaling.signal.SIGTERM, before)
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert line.startswith(f'{name}: ') and message in line


def test_processes_without_cores_are_refused(capsys):
  with pytest.raises(ValueError, match='need a core each'):
    scaling.prepare(resolve(small()), 100_000)
