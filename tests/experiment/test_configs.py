"""Configs have the values of the papers' tables; Atari configs use Machado et al.'s protocol."""

import functools
import re
import runpy
from pathlib import Path

import pytest
from absl.flags import FlagValues

from podracer_jit import experiment, options
from podracer_jit.configs import (
  impala_atari,
  ppo_atari,
  ppo_atari_8,
  ppo_minatar,
  ppo_mujoco,
  ppo_mujoco_fast,
  ppo_pong_envpool,
  pqn_minatar,
  rl_games,
  sac_mujoco,
  td3_mujoco,
)
from podracer_jit.experiment.flags import parse
from podracer_jit.experiment.resolve import placement_of, resolve
from podracer_jit.replay.options import ReplayOptions
from tests.runs import changed, prepared, run, small

ROOT = Path(__file__).resolve().parents[2]


def in_examples(name):
  """Returns what a module of examples/ defines."""
  return runpy.run_path(str(ROOT / 'examples' / f'{name}.py'))


def r2d2_on_pong():
  """Returns a config with the defaults of R2D2, since no shipped one has the paper's settings."""
  config = experiment.config('r2d2', 'nature_cnn', 'adam', scheme='apex_lockstep')
  config.env.task = 'Pong-v5'
  config.unroll_length = 40
  config.network.core = 'lstm'
  return config


# 1709.06009, table 2 and section 3. EnvPool's noop_max of 1 means no no-ops.
PROTOCOL = {
    'env.num_envs': 128, 'env.repeat_action_probability': 0.25, 'env.full_action_space': True,
    'env.noop_max': 1, 'env.episodic_life': False, 'env.frame_skip': 4,
    'env.max_episode_steps': 108_000 // 4, 'env.reward_clip': True,
    'total_steps': 50_000_000, 'num_minibatches': 4, 'optimizer.anneal': True,
    'loss.discount': 0.99, 'loss.entropy_coef': 0.01, 'network.name': 'impala_resnet',
    'network.channels': (16, 32, 32), 'network.blocks': 2, 'network.hidden': 256}
MUJOCO = {
    'loss.discount': 0.99, 'loss.gae_lambda': 0.95, 'loss.clip': 0.2, 'loss.entropy_coef': 0.0,
    'loss.normalise_advantage': True, 'optimizer.name': 'adam', 'optimizer.eps': 1e-5,
    'optimizer.anneal': True, 'network.hidden': (64, 64), 'network.separate_critic': True,
    'normalise.obs': True, 'normalise.reward': True, 'normalise.value': False, 'policy': 'auto'}
RL_GAMES = {
    'env.num_envs': 64, 'loss.gae_lambda': 0.95, 'loss.clip': 0.2, 'loss.value_coef': 2.0,
    'optimizer.max_grad_norm': 1.0, 'optimizer.anneal': False, 'normalise.value': True,
    'network.separate_critic': False}
CASES = {  # 2310.00036
    'table 3': (impala_atari.get_config, PROTOCOL | {
        'unroll_length': 20, 'num_epochs': 1, 'scheme': 'cleanba', 'optimizer.name': 'rmsprop',
        'optimizer.learning_rate': 6e-4, 'optimizer.decay': 0.99, 'optimizer.eps': 0.01,
        'optimizer.max_grad_norm': 40.0, 'loss.baseline_coef': 0.5, 'loss.vtrace_lambda': 1.0,
        'loss.clip_rho': 1.0, 'loss.clip_pg_rho': 1.0}),
    'table 2': (ppo_atari.get_config, PROTOCOL | {
        'unroll_length': 128, 'num_epochs': 4, 'scheme': 'sync', 'optimizer.name': 'adam',
        'optimizer.learning_rate': 2.5e-4, 'optimizer.eps': 1e-5, 'optimizer.max_grad_norm': 0.5,
        'loss.gae_lambda': 0.95, 'loss.clip': 0.1, 'loss.clip_value': False,
        'loss.value_coef': 0.5, 'loss.normalise_advantage': True}),
    'appendix E': (functools.partial(ppo_atari.get_config, 'appendix_e'), PROTOCOL | {
        'unroll_length': 20, 'num_epochs': 1, 'optimizer.name': 'rmsprop',
        'optimizer.learning_rate': 6e-4, 'optimizer.decay': 0.99, 'optimizer.eps': 0.01,
        'optimizer.max_grad_norm': 40.0, 'loss.name': 'ppo', 'loss.clip': 0.1,
        'scheme': 'cleanba'}),
    'appendix F': (functools.partial(ppo_atari.get_config, 'appendix_f'), PROTOCOL | {
        'total_steps': 100_000_000, 'optimizer.anneal': False, 'optimizer.name': 'adam',
        'optimizer.learning_rate': 2.5e-4, 'unroll_length': 128, 'scheme': 'sync'}),
    # 1707.06347, table 3, with additions of openai/baselines (CleanRL's ppo_continuous_action).
    'one million steps': (ppo_mujoco.get_config, MUJOCO | {
        'total_steps': 1_000_000, 'env.num_envs': 1, 'unroll_length': 2048, 'num_epochs': 10,
        'num_minibatches': 32, 'optimizer.learning_rate': 3e-4, 'loss.clip_value': True,
        'loss.value_coef': 0.5, 'optimizer.max_grad_norm': 0.5}),
    # 2206.10558
    'table 5': (ppo_mujoco_fast.get_config, MUJOCO | {
        'total_steps': 10_000_000, 'env.num_envs': 64, 'unroll_length': 64, 'num_epochs': 2,
        'num_minibatches': 4, 'optimizer.learning_rate': 2.95e-3, 'loss.clip_value': False,
        'loss.value_coef': 1.3, 'optimizer.max_grad_norm': 3.5}),
    # 2206.10558's table 3; both papers have a table of this number.
    'table 3 of EnvPool': (ppo_atari_8.get_config, {
        'total_steps': 10_000_000, 'env.num_envs': 8, 'unroll_length': 128, 'num_epochs': 4,
        'num_minibatches': 4, 'optimizer.name': 'adam', 'optimizer.learning_rate': 2.5e-4,
        'optimizer.eps': 1e-5, 'optimizer.anneal': True, 'loss.discount': 0.99,
        'loss.gae_lambda': 0.95, 'loss.clip': 0.1, 'loss.clip_value': True,
        'loss.value_coef': 0.5, 'loss.entropy_coef': 0.01, 'optimizer.max_grad_norm': 0.5,
        'loss.normalise_advantage': True}),
    'table 4': (ppo_pong_envpool.get_config, {
        'total_steps': 7_000_000, 'env.num_envs': 64, 'unroll_length': 128, 'num_epochs': 4,
        'num_minibatches': 4, 'optimizer.name': 'adam', 'optimizer.learning_rate': 2e-3,
        'optimizer.anneal': False, 'loss.discount': 0.99, 'loss.gae_lambda': 0.95,
        'loss.clip': 0.1, 'loss.clip_value': False, 'loss.value_coef': 2.24,
        'loss.entropy_coef': 0.0, 'optimizer.max_grad_norm': 1.13}),
    # Tables 6 to 8 of 2206.10558.
    **{f'table 6, {task}': (functools.partial(rl_games.get_config, task), RL_GAMES | {
        'env.task': f'{task}-v4', 'unroll_length': steps, 'num_epochs': epochs,
        'network.hidden': sizes, 'network.activation': 'elu', 'network.weight_init': 'xavier',
        'num_minibatches': 2, 'loss.discount': 0.99, 'loss.reward_scale': 0.1,
        'loss.entropy_coef': 0.0, 'loss.clip_smoothly': True, 'optimizer.kl_target': 0.008,
        'optimizer.learning_rate': 3e-4, 'loss.clip_value': True, 'normalise.obs': True})
       for task, steps, epochs, sizes in (
           ('HalfCheetah', 256, 5, (128, 64, 32)), ('Ant', 64, 4, (256, 128, 64)),
           ('Walker2d', 128, 5, (256, 128, 64)), ('Humanoid', 128, 5, (512, 256, 128)))},
    'table 7': (functools.partial(rl_games.get_config, 'Breakout'), RL_GAMES | {
        'env.task': 'Breakout-v5', 'unroll_length': 128, 'num_epochs': 2, 'num_minibatches': 4,
        'loss.discount': 0.999, 'loss.entropy_coef': 0.01, 'optimizer.learning_rate': 8e-4,
        'optimizer.kl_target': 0.0, 'loss.clip_value': False, 'normalise.obs': False,
        'network.name': 'nature_cnn', 'network.activation': 'relu'}),
    'table 8': (functools.partial(rl_games.get_config, 'Pong'), RL_GAMES | {
        'env.task': 'Pong-v5', 'unroll_length': 128, 'num_epochs': 2, 'num_minibatches': 8,
        'total_steps': 8_000_000, 'loss.discount': 0.999, 'loss.entropy_coef': 0.01,
        'optimizer.learning_rate': 3e-4, 'optimizer.kl_target': 0.01, 'loss.clip_value': True,
        'network.name': 'nature_cnn', 'network.activation': 'elu', 'normalise.obs': True}),
    # 2007.02622, section 4.2.
    'Obstacle Tower': (in_examples('obstacle_tower')['get_config'], {
        'scheme': 'rapid', 'network.name': 'fixup_resnet', 'network.core': 'gru',
        'network.core_size': 256, 'unroll_length': 800, 'env.num_envs': 16, 'num_epochs': 2,
        'num_minibatches': 16 * 800 // 1600, 'loss.clip': 0.15, 'loss.value_coef': 0.2,
        'loss.entropy_coef': 0.01, 'loss.discount': 0.99, 'loss.gae_lambda': 0.95,
        'optimizer.name': 'adam', 'optimizer.anneal': False, 'optimizer.learning_rate':
        'piecewise:4e-4:100000000steps=1e-4:400000000steps=2.5e-5'}),
    # 1802.09477, section 6.1, with sizes, rate, batch and random steps of the authors' later
    # program (CleanRL's td3_continuous_action).
    'TD3': (td3_mujoco.get_config, {
        'total_steps': 1_000_000, 'env.task': 'HalfCheetah-v4', 'network.hidden': (256, 256),
        'network.activation': 'relu', 'network.weight_init': 'fan_in', 'optimizer.name': 'adam',
        'optimizer.learning_rate': 3e-4, 'optimizer.anneal': False, 'optimizer.eps': 1e-8,
        'loss.discount': 0.99, 'loss.tau': 0.005,
        'loss.num_critics': 2, 'loss.policy_delay': 2, 'loss.target_noise': 0.2,
        'loss.target_noise_clip': 0.5, 'loss.noise': 0.1, 'loss.n_step': 1,
        'replay.min_size': 25_000, 'replay.capacity': 1_000_000,
        'replay.batch_size': 256, 'replay.gradient_steps': 4 * 8, 'unroll_length': 4,
        'env.num_envs': 8, 'replay.priority_exponent': 0.0}),
    # 1812.05905, table 1, with the critics' rate of CleanRL's sac_continuous_action.
    'SAC': (sac_mujoco.get_config, {
        'total_steps': 1_000_000, 'env.task': 'HalfCheetah-v4', 'network.hidden': (256, 256),
        'network.activation': 'relu', 'optimizer.name': 'adam', 'optimizer.learning_rate': 3e-4,
        'loss.critic_rate': pytest.approx(1e-3 / 3e-4), 'optimizer.anneal': False,
        'loss.discount': 0.99, 'loss.tau': 0.005, 'loss.num_critics': 2,
        'loss.target_entropy': -1.0, 'loss.n_step': 1, 'replay.capacity': 1_000_000,
        'replay.batch_size': 256, 'replay.gradient_steps': 4 * 8, 'unroll_length': 4,
        'env.num_envs': 8, 'replay.priority_exponent': 0.0}),
    # Kapturowski et al. 2019, section 2.3 and table 2: what has a star in losses/r2d2.py.
    'R2D2': (r2d2_on_pong, {
        'loss.discount': 0.997, 'loss.n_step': 5, 'loss.burn_in': 40, 'loss.trace_length': 80,
        'loss.target_every': 2500, 'loss.eta': 0.9, 'loss.epsilon': 0.4,
        'loss.epsilon_alpha': 7.0}),
    # The authors' program of 2407.04811 for MinAtar.
    'PQN': (pqn_minatar.get_config, {
        'total_steps': 10_000_000, 'env.num_envs': 128, 'unroll_length': 32, 'num_minibatches': 32,
        'num_epochs': 2, 'loss.discount': 0.99, 'loss.trace_lambda': 0.65,
        'loss.epsilon': 'linear:1:0.05:0.1', 'optimizer.name': 'radam',
        'optimizer.learning_rate': 5e-4, 'optimizer.anneal': True, 'optimizer.max_grad_norm': 10.0,
        'network.channels': (16,), 'network.kernels': (3,), 'network.hidden': 128,
        'network.layer_norm': True}),
    # PureJaxRL, examples/brax_minatar.ipynb; its loss has half of the squared error, too.
    'PPO on MinAtar': (ppo_minatar.get_config, {
        'total_steps': 10_000_000, 'env.num_envs': 64, 'unroll_length': 128, 'num_minibatches': 8,
        'num_epochs': 4, 'loss.discount': 0.99, 'loss.gae_lambda': 0.95, 'loss.clip': 0.2,
        'loss.clip_value': True, 'loss.value_coef': 0.5, 'loss.entropy_coef': 0.01,
        'loss.normalise_advantage': True, 'optimizer.name': 'adam', 'optimizer.eps': 1e-5,
        'optimizer.learning_rate': 5e-3, 'optimizer.anneal': True, 'optimizer.max_grad_norm': 0.5,
        'network.hidden': (64, 64), 'network.activation': 'relu',
        'network.separate_critic': True})}


@pytest.mark.parametrize('case', CASES)
def test_a_config_has_the_values_of_the_papers_table(case):
  get_config, expected = CASES[case]
  config = get_config()
  for field, value in expected.items():
    configured = config
    for part in field.split('.'):
      configured = configured[part]
    assert configured == value, field
  if config.env.task != 'my_envs:Tower':
    resolve(config)


@pytest.mark.parametrize('arg', ['Pong', 'Breakout', 'HalfCheetah', 'appendix_e', 'appendix_f'])
def test_settings_of_a_config_make_their_smoke_run(arg):
  module = ppo_atari if arg.startswith('appendix') else rl_games
  config = module.get_config(f'smoke,{arg}').to_dict()
  if config['env']['task'] not in ('HalfCheetah-v4',):
    config['env'] |= dict(img_height=42, img_width=42)
    config['network'] |= dict(hidden=16)
  receipts, _, _ = run(config, updates=2)
  assert len(set(receipts)) == 2


def test_rl_games_takes_one_task():
  with pytest.raises(ValueError, match='^rl_games: takes one task, got Ant and Pong'):
    rl_games.get_config('Pong,Ant')


@pytest.mark.parametrize('fields, message', [
    (dict(loss__clip_smoothly=True, loss__clip=0.0), 'loss.clip: with loss.clip_smoothly'),
    (dict(loss__vtrace_variant='nappo'), 'loss.vtrace_variant: without loss.vtrace it must be'),
    (dict(loss__reward_scale='linear:1:0'), 'loss.reward_scale: '),
    (dict(placement__learner_delay_s=0.1, scheme='fused'),
     'placement.learner_delay_s: fused has no learner that waits by itself; must be 0; sync'),
    (dict(placement__learner_delay_s=0.1, scheme='dppo_async'),
     'placement.learner_delay_s: dppo_async has')])
def test_settings_that_exclude_each_other_are_refused(fields, message):
  with pytest.raises(ValueError, match='^' + re.escape(message)):
    resolve(changed(small('ppo'), **fields))


def test_a_fixed_set_of_epsilons_is_a_flag():
  experiment = resolve(parse(
      ['train', '--config=apex_dqn_catch', '--config.loss.epsilons=0.5,0.25,0'], FlagValues()))
  assert list(experiment.algorithm.exploration(4)) == [0.5, 0.25, 0.0, 0.5]
  for wrong in ('0.5,2', '(True,)', '7'):
    with pytest.raises(ValueError, match='^loss.epsilons: '):
      resolve(parse(['train', '--config=apex_dqn_catch', f'--config.loss.epsilons={wrong}'],
                    FlagValues()))


@pytest.mark.parametrize('name, actors, learners, processes, num_envs', [
    ('a0_l1', (0,), (1,), 1, 128), ('a0_l0', (0,), (0,), 1, 128),
    ('a0_l1,2,3', (0,), (1, 2, 3), 1, 120), ('a0+1_l2+3_d2', (0, 1), (2, 3), 2, 128),
    ('a0_l1,2,3_d2', (0,), (1, 2, 3), 2, 120)])
@pytest.mark.parametrize('config', ['impala_atari', 'ppo_atari'])
def test_placements_by_their_names_in_cleanba_fit_its_configs(config, name, actors, learners,
                                                              processes, num_envs):
  given = in_examples('cleanba_names')['flags'](name)
  flags = [flag for flag in given if flag != '--distributed']
  assert (len(flags) < len(given)) == (processes > 1)
  experiment = resolve(parse(['train', f'--config=configs/{config}.py', *flags], FlagValues()))
  place = experiment.placement
  assert (place.actor_devices, place.learner_devices) == (actors, learners)
  assert experiment.env.num_envs == num_envs
  # Each actor has as many shards, and each learner one group.
  assert experiment.num_shards == 2 * len(actors) * processes
  assert experiment.num_grad_shards == len(learners) * processes


@pytest.mark.parametrize('name', ['', 'a0', 'l1', 'a_l1', 'a0_l1_d0', 'a0_l1 2'])
def test_other_names_of_placements_are_refused(name):
  flags = in_examples('cleanba_names')['flags']
  with pytest.raises(ValueError, match='such as a0_l1,2,3'):
    flags(name)


@pytest.mark.parametrize('fields, message', [
    (dict(shceme='sync'), 'shceme: there is no such field; did you mean scheme?'),
    (dict(placement__env_thread=1),
     'placement.env_thread: there is no such field; did you mean placement.env_threads?'),
    (dict(normalise__observations=True), 'normalise.observations: there is no such field'),
    (dict(replay=options.defaults(ReplayOptions)), 'replay: there is no such field'),
    (dict(placement=3), 'placement: must have the fields actor_cpus, actor_devices, '),
    (dict(loss='ppo'), 'loss.name: is missing'),
    (dict(total_steps='many'), "total_steps: must be a whole number, got 'many'"),
    (dict(seed=None), 'seed: has no value yet; set it, for example by --config.seed='),
    (dict(log={'window': 100, 'every_seconds': 1.0}), 'log.every_updates: is missing')])
def test_a_misspelled_or_wrong_field_of_a_config_is_refused(fields, message):
  config = changed(small('ppo'), **fields)
  with pytest.raises(ValueError, match='^' + re.escape(message)):
    prepared(config)
  if message.startswith('placement'):  # which is read before all others
    with pytest.raises(ValueError, match='^' + re.escape(message)):
      placement_of(config)
