"""The members of a sweep: the product of what the flags name."""

import pytest

from podracer_jit.experiment.flags import fields_of
from podracer_jit.runtime import host
from podracer_jit.runtime.machine import Machine
from podracer_jit.sweep import members, sizes
from podracer_jit.sweep.members import Member


@pytest.mark.parametrize('text, seeds', [
    ('1', [1]), ('1:3', [1, 2, 3]), ('1,5', [1, 5]), ('7, 1:2', [7, 1, 2]), ('0:0', [0])])
def test_seeds(text, seeds):
  assert members.seeds_of(text) == seeds


@pytest.mark.parametrize('text', ['', '3:1', 'a', '-1', '1:2:3', '1.5', '1:', ':3'])
def test_seeds_that_are_none(text):
  with pytest.raises(ValueError, match='^--seeds: must be numbers and ranges such as 1:3'):
    members.seeds_of(text)


def test_a_seed_counts_once():
  with pytest.raises(ValueError, match='^--seeds: names 2 twice'):
    members.seeds_of('1:3,2')


def test_very_many_seeds_are_refused():
  assert members.seeds_of('1:99999,0')[-2:] == [99_999, 0]
  for text in ('1:1000000000', '1:100001', '1:60000,60001:120000'):
    with pytest.raises(ValueError, match='^--seeds: must be at most 100,000 seeds, got '):
      members.seeds_of(text)


@pytest.mark.parametrize('flag, name, values', [
    ('optimizer.learning_rate=1e-3,3e-4', 'optimizer.learning_rate', [1e-3, 3e-4]),
    ('--config.loss.clip=0.1', 'loss.clip', [0.1]),
    ('network.hidden=(64,64),(128,)', 'network.hidden', [(64, 64), (128,)]),
    ('network.activation=relu, tanh', 'network.activation', ['relu', 'tanh']),
    ('loss.clip=linear:0.2:0', 'loss.clip', ['linear:0.2:0']),
    ('normalise.obs=True,False', 'normalise.obs', [True, False]),
    ('optimizer.learning_rate=log(1e-4,1e-2)', 'optimizer.learning_rate', ['log(1e-4,1e-2)']),
    ('a.b="64,64","32"', 'a.b', ['64,64', '32']),
    ("a.b='x)',('(',2),it's", 'a.b', ['x)', ('(', 2), "it's"])])
def test_values(flag, name, values):
  assert members.values_of(flag) == (name, values)


@pytest.mark.parametrize('flag, message', [
    ('loss.clip', 'must be FIELD=VALUE,VALUE'),
    ('=1', 'must be FIELD=VALUE,VALUE'),
    ('loss.clip=', 'a value is missing'),
    ('loss.clip=0.1,', 'a value is missing'),
    ('network.hidden=(64,64', 'a bracket is not closed'),
    ('network.hidden=64)', 'a bracket is not closed'),
    ('loss.clip=0.1,0.1', 'names 0.1 twice, in .*0.1.$'),
    ('network.hidden=64,64', r'names 64 twice, in .*; one tuple is written '
     r'network.hidden=\(64,64\)$'),
    ('a.b="64,64', 'a quote is not closed'),
    ('seed=1,2', 'seed has a flag of its own, --seeds=1:3')])
def test_values_that_are_none(flag, message):
  with pytest.raises(ValueError, match=f'^--grid: {message}'):
    members.values_of(flag)


def test_tasks_of_a_set_take_its_place():
  tasks = members.tasks_of(['CartPole-v1', '@atari5'])
  assert tasks[0] == 'CartPole-v1' and len(tasks) == 6 and 'Qbert-v5' in tasks
  with pytest.raises(ValueError, match='^--tasks: there is no set @atari6; there are @atari57'):
    members.tasks_of(['@atari6'])
  with pytest.raises(ValueError, match='^--tasks: names Qbert-v5 twice'):
    members.tasks_of(['Qbert-v5', '@atari5'])


def product(**changes):
  arguments = dict(configs=['ppo_cartpole:smoke'], tasks=[], seeds=[1, 2],
                   grid=[('loss.clip', [0.1, 0.2]), ('network.hidden', [(8, 8)])],
                   flags=['--config.total_steps=500'])
  return members.product(**arguments | changes)


@pytest.mark.quick
def test_all_values_multiply_and_each_member_says_what_it_is():
  assert [member.name for member in product()] == [
      'ppo_cartpole_smoke,clip=0.1,hidden=8_8,seed=1',
      'ppo_cartpole_smoke,clip=0.1,hidden=8_8,seed=2',
      'ppo_cartpole_smoke,clip=0.2,hidden=8_8,seed=1',
      'ppo_cartpole_smoke,clip=0.2,hidden=8_8,seed=2']
  both = product(configs=['ppo_cartpole', 'mine/own.py'], tasks=['CartPole-v1', 'Acrobot-v1'])
  assert len(both) == 16
  assert both[-1].name == 'own,Acrobot-v1,clip=0.2,hidden=8_8,seed=2'
  named = product(grid=[('network.name', ['simba'])], seeds=[1])
  assert [member.name for member in named] == ['ppo_cartpole_smoke,network=simba,seed=1']


def test_long_names_are_cut_and_stay_apart():
  long = [members.member_of('x', {'a': 'b' * 300, 'seed': seed}).name for seed in (1, 2, 1)]
  assert [len(name) for name in long] == [200] * 3
  assert long[0] == long[2] != long[1] and long[0].startswith('x,a=bbb')


def test_names_do_not_depend_on_other_members():
  names = {member.name for member in product()}
  more = product(seeds=[1, 2, 3], grid=[('loss.clip', [0.1, 0.2, 0.3]),
                                        ('network.hidden', [(8, 8), (16,)])])
  assert names < {member.name for member in more}


def test_a_member_has_the_config_that_its_fields_say():
  member = product(tasks=['Acrobot-v1'])[2]
  config = fields_of(member.arguments())
  assert config['seed'] == 1 and config['loss']['clip'] == 0.2
  assert config['network']['hidden'] == (8, 8) and config['total_steps'] == 500
  assert config['env']['task'] == 'Acrobot-v1'
  assert Member.of_json(member.as_json()) == member


@pytest.mark.parametrize('changes, message', [
    (dict(configs=['a/ppo.py', 'b/ppo.py']), 'two members would have one name, ppo,'),
    (dict(grid=[('loss.clip', [0.1]), ('loss.clip', [0.2])]), '--grid: loss.clip is given twice'),
    (dict(flags=['--config.loss.clip=0.1']), '--config.loss.clip: is given to all members'),
    (dict(flags=['--config.seed=1']), '--config.seed: --seeds=1:3 names the seeds'),
    (dict(tasks=['A-v1'], flags=['--config.env.task=B-v1']), '--config.env.task: is given to all'),
    (dict(grid=[('network.name', ['mine:Net', 'mine_Net'])]), 'two members would have one name'),
    (dict(grid=[('a.b', ['é', 'ü'])], seeds=[1]), 'two members would have one name, .*; of configs '
     'and values it has only letters, digits and . _ = . -, so change one, or make another sweep'),
    (dict(configs=['a', 'b', 'a']), '--config: names a twice')])
def test_products_that_are_refused(changes, message):
  with pytest.raises(ValueError, match=f'^{message}'):
    product(**changes)


def test_lists_of_seeds_that_follow_each_other():
  lists = members.same_but_seeds(product(seeds=[1, 2, 4, 5, 3]))
  assert [[member.seeds[0] for member in each] for each in lists[:3]] == [[1, 2], [4, 5], [3]]
  assert len(lists) == 6
  together = members.together(lists[1])
  assert together.seeds == range(4, 6) and together.num_seeds == 2
  assert together.arguments()[-1] == '--num_seeds=2'
  assert [path.name for path in together.workdirs(members.Path('x'))] == ['seed4', 'seed5']


def test_seeds_are_in_one_program_on_any_machine(monkeypatch):
  """Also where a run of one seed is given several devices."""
  flags = ['--config.env.task=gymnax:CartPole-v1', '--config.num_shards=2',
           '--config.num_grad_shards=2', '--config.env.num_envs=2048', '--config.unroll_length=512']
  groups = members.same_but_seeds(members.product(['ppo_cartpole'], [], [1, 2, 3], [], flags))
  for cores in (1, 16):
    monkeypatch.setattr(host, '_machine', [(Machine(cores, cores), 1)])
    checked = sizes.check(groups, {})
    assert [member.num_seeds for member in checked.members] == [3]
