"""The placement that the rule chooses, on a table of machines.

On machines with one and two cores the placements were measured; the others are what the rule says.
"""

import dataclasses
import sys

import pytest

from podracer_jit import experiment as experiments
from podracer_jit.configs import (
  apex_dqn_pong_laptop,
  impala_atari,
  impala_catch,
  ppo_atari,
  ppo_cartpole,
  ppo_mujoco_fast,
)
from podracer_jit.experiment import placing
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime.machine import Machine
from tests import processes

CONFIGS = {'impala_atari': impala_atari, 'impala_catch': impala_catch, 'ppo_atari': ppo_atari,
           'ppo_mujoco_fast': ppo_mujoco_fast}


def placed(config, machine, processes=1, **spec):
  """Returns the placement of a config; its fields left open are as the config has them.

  Args:
    config: to place.
    machine: that it runs on.
    processes: of the run.
    **spec: what is different in the task.
  """
  experiment = resolve(config)
  experiment = dataclasses.replace(experiment, spec=experiment.spec._replace(**spec))
  place = experiment.placement
  given = dataclasses.replace(
      place, chosen=(), **{name: type(getattr(place, name))() for name in place.chosen})
  return placing.placed(dataclasses.replace(experiment, placement=given), machine, processes)


def up_to(n):
  return tuple(range(n))


@pytest.mark.parametrize('name, cores, actors, learners, env_threads, xla_threads', [
    # 128 games, two shards, four gradient groups.
    ('impala_atari', 1, 1, 1, 1, 2),
    ('impala_atari', 2, 2, 2, 1, 2),
    ('impala_atari', 4, 2, 4, 2, 4),
    ('impala_atari', 8, 2, 4, 4, 8),
    ('impala_atari', 64, 2, 4, 32, 16),
    # Eight gradient groups; six cores do not divide them.
    ('ppo_atari', 2, 2, 2, 1, 2),
    ('ppo_atari', 6, 2, 4, 3, 6),
    ('ppo_atari', 16, 2, 8, 8, 16),
    # Small updates are on one device, with few threads.
    ('impala_catch', 1, 1, 1, 1, 2),
    ('impala_catch', 2, 1, 1, 1, 2),
    ('impala_catch', 64, 1, 1, 1, 2),
    # 64 simulators of 25 us keep up to 11 threads busy.
    ('ppo_mujoco_fast', 1, 1, 1, 1, 2),
    ('ppo_mujoco_fast', 2, 1, 1, 2, 2),
    ('ppo_mujoco_fast', 4, 1, 1, 4, 2),
    ('ppo_mujoco_fast', 64, 1, 1, 11, 2)])
def test_table(name, cores, actors, learners, env_threads, xla_threads):
  place = placed(CONFIGS[name].get_config(), Machine(cores, min(cores, 8)))
  assert (place.actor_devices, place.learner_devices, place.actors_per_device) == (
      up_to(actors), up_to(learners), 1)
  assert (place.env_threads, place.xla_threads) == (env_threads, xla_threads)


@pytest.mark.parametrize('gpus, learners', [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_learners_take_the_gpus(gpus, learners):
  place = placed(impala_atari.get_config(), Machine(16, 8, gpus))
  assert place.learner_devices == up_to(learners)
  assert place.actor_devices == up_to(min(gpus, 2))


def test_learners_take_the_tpus_and_simulators_stay_with_the_cpus():
  place = placed(impala_atari.get_config(), Machine(16, 8, tpus=4))
  assert (place.learner_devices, place.actor_devices) == (up_to(4), up_to(2))
  # Those of one core would share it; functions are on the TPUs.
  for is_function, actors in ((False, 1), (True, 2)):
    place = placed(impala_atari.get_config(), Machine(1, 1, tpus=4), is_function=is_function)
    assert (place.learner_devices, place.actor_devices) == (up_to(4), up_to(actors))


@pytest.mark.parametrize('config, on_cpus', [(ppo_atari, 64), (ppo_cartpole, 4096)])
def test_microbatches_are_for_the_caches_of_cpus(config, on_cpus):
  experiment = resolve(config.get_config())
  assert experiment.chooses_microbatch
  assert experiment.microbatch_rows == experiment.fields['microbatch_rows'] == on_cpus
  assert placing.microbatch_rows(experiment.spec, Machine(64, 8)) == on_cpus
  assert placing.microbatch_rows(experiment.spec, Machine(2, 2, gpus=1)) == 0
  assert placing.microbatch_rows(experiment.spec, Machine(2, 2, tpus=1)) == 0


def test_actors_on_cpus_beside_learners_on_gpus():
  config = impala_atari.get_config()
  config.placement.actor_platform = 'cpu'
  place = placed(config, Machine(16, 8, gpus=1))
  assert (place.actor_devices, place.learner_devices) == ((0, 1), (0,))


def test_processes_share_shards_and_groups():
  place = placed(impala_atari.get_config(), Machine(8, 8), processes=2)
  assert (place.actor_devices, place.learner_devices, place.env_threads) == ((0,), (0, 1), 8)


def test_devices_that_jax_has_started_with_are_the_most():
  place = placed(ppo_atari.get_config(), Machine(16, 8, devices=2))
  assert place.num_devices == 2


def test_fields_that_a_config_sets_are_kept():
  config = impala_atari.get_config()
  config.placement.learner_devices = (3,)
  config.placement.env_threads = 5
  place = placed(config, Machine(2, 2))
  assert (place.learner_devices, place.env_threads) == ((3,), 5)
  assert place.chosen == ('actor_devices', 'actors_per_device', 'xla_threads')
  # There is a thread for each device.
  assert place.xla_threads == 4


def test_without_auto_there_is_one_device():
  config = impala_atari.get_config()
  config.placement.auto = False
  place = placed(config, Machine(64, 8))
  assert (place.actor_devices, place.learner_devices, place.actors_per_device,
          place.env_threads) == ((0,), (0,), 1, 0)


@pytest.mark.parametrize('scheme, actors, learners', [
    ('sync', 2, 2), ('cleanba', 2, 2), ('ppo', 1, 1), ('ddppo', 2, 2), ('dppo', 2, 2),
    ('rapid', 2, 2), ('impala', 2, 2),
    # Results depend on the number of workers.
    ('rapid_async', 2, 1), ('dppo_async', 1, 1)])
def test_schemes(scheme, actors, learners):
  config = impala_atari.get_config()
  config.scheme = scheme
  place = placed(config, Machine(2, 2))
  assert (place.actor_devices, place.learner_devices) == (up_to(actors), up_to(learners))


def test_asynchronous_pools_have_an_actor_each():
  config = impala_atari.get_config()
  config.scheme = 'impala'
  config.num_shards = 4
  config.env_batch = 16
  for cores in (1, 2, 8):
    assert placed(config, Machine(cores, cores)).num_actors == 4


def test_a_plain_all_reduce_keeps_its_one_device():
  config = impala_atari.get_config()
  config.exact_reduce = False
  assert placed(config, Machine(8, 8)).learner_devices == (0,)


@pytest.mark.parametrize('num_envs, updates', [
    # A row takes 1.3 us with its gradient, so 8,192 rows 11 ms; a call is to take 250.
    (64, 32), (512, 4), (16384, 1)])
def test_calls_of_a_program_are_short(num_envs, updates):
  config = experiments.config('ppo', 'mlp', 'adam', scheme='fused', unroll_length=128,
                              num_minibatches=4)
  config.env.task = 'CartPole-v1'
  config.env.num_envs = num_envs
  assert placed(config, Machine(2, 2)).updates_per_call == updates


def test_flags_give_the_same_placement():
  place = placed(impala_atari.get_config(), Machine(2, 2))
  assert placing.as_flags(place) == (
      "--config.placement.actor_devices='(0,1)' --config.placement.learner_devices='(0,1)' "
      '--config.placement.actors_per_device=1 --config.placement.env_threads=1 '
      '--config.placement.xla_threads=2')


def test_one_program_is_on_several_devices_only_with_functions():
  config = ppo_atari.get_config()
  config.scheme = 'fused'
  for is_function, devices in ((False, 1), (True, 2)):
    place = placed(config, Machine(16, 8), is_function=is_function)
    assert place.actor_devices == place.learner_devices == up_to(devices)
    others = placing.alternatives(dataclasses.replace(
        resolve(config), placement=place, spec=resolve(config).spec._replace(
            is_function=is_function)), devices=16)
    assert [other.learner_devices for other in others] == ([(0,)] if is_function else [])


def test_each_worker_of_gradients_has_as_many_actors_beside_a_load():
  config = impala_catch.get_config()
  config.scheme = 'rapid_async'
  config.num_shards = config.num_grad_shards = 4
  config.placement.learner_devices = (0, 1)
  for machine in (Machine(8, 8), Machine(2, 2), Machine(1, 1, busy=1)):
    assert len(placed(config, machine).actor_devices) % 2 == 0


def test_the_number_of_actors_with_free_rates_does_not_follow_the_load():
  config = apex_dqn_pong_laptop.get_config()
  config.scheme = 'apex'
  config.num_shards = config.num_grad_shards = 2
  places = [placed(config, machine) for machine in (Machine(2, 2), Machine(1, 1, busy=1))]
  assert places[0].actor_devices == places[1].actor_devices == (0, 1)


def test_environments_in_python_have_a_process_for_each_core():
  config = impala_catch.get_config()
  place = placed(config, Machine(8, 8), calls_python=True, step_us=50.0)
  assert place.env_threads == 8
  assert placed(config, Machine(64, 8), calls_python=True).env_threads == 32  # environments


def test_threads_of_xla_do_not_follow_the_load():
  # Programs for other numbers of threads would be compiled anew.
  config = ppo_atari.get_config()
  idle, loaded = (placed(config, machine) for machine in (Machine(8, 8), Machine(2, 2, busy=6)))
  assert (idle.xla_threads, idle.num_devices) == (8, 8)
  assert (loaded.xla_threads, loaded.num_devices) == (8, 2)


PREPARED = """
import os
from podracer_jit.experiment.resolve import resolve
from podracer_jit.configs import ppo_cartpole
from podracer_jit.runtime import host
from podracer_jit.runtime.machine import Machine
host._machine.append((Machine(6, 6, busy=2), 1))
config = ppo_cartpole.get_config()
config.env.task = 'gymnax:CartPole-v1'
print(resolve(config).placement.xla_threads, os.environ['NPROC'])
"""


def test_a_task_that_starts_jax_has_the_threads_that_its_placement_says():
  done = processes.run([sys.executable, '-c', PREPARED])
  assert done.stdout.split() == ['8', '8'], done.stderr
