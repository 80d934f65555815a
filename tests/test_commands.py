"""The command line: verbs, their help, and the verbs that only list."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from podracer_jit.cli import compare, configs, envs, main, train
from podracer_jit.envs import envpool_envs
from podracer_jit.envs.families import tasks as tasks_by_family
from tests import extras, processes
from tests.runs import QUICK

ROOT = next(path for path in Path(__file__).resolve().parents if (path / 'setup.cfg').exists())


def run_python(*args, **kwargs):
  """Runs the command in a new Python, not in a child of the fork server."""
  return subprocess.run(processes.command(*args), capture_output=True, text=True,
                        timeout=300, env=QUICK, check=False, **kwargs)


@pytest.mark.parametrize('verb', main.VERBS)
@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_the_help_of_each_verb_has_an_example(verb, flag, capsys):
  assert main.main(['podracer_jit', verb, flag]) == 0
  out, err = capsys.readouterr()
  assert f'\n  podracer_jit {verb}' in out and 'Exit code: 0' in out
  assert not err


def test_help_lists_the_verbs_before_the_flags(capsys):
  assert main.main(['podracer_jit', '--help']) == 0
  out = capsys.readouterr().out
  places = [out.index(f'\n  {verb} ') for verb in main.VERBS]
  assert places == sorted(places) and places[-1] < out.index('--workdir:')


def test_the_version_is_that_of_the_package(capsys):
  assert main.main(['podracer_jit', '--version']) == 0
  declared = re.search(r'^version = (.+)$', (ROOT / 'setup.cfg').read_text(), re.MULTILINE)
  assert capsys.readouterr().out == f'podracer_jit {declared[1]}\n'


@pytest.mark.parametrize('steps_b, heading, row', [
    (0, ['update', 'steps', 'return', 'A', 'return', 'B'], ['2', '200', '2.00', '-']),
    (50, ['update', 'steps', 'A', 'steps', 'B', 'return', 'A', 'return', 'B'],
     ['2', '200', '250', '2.00', '-'])])
def test_the_curves_of_two_runs_stand_at_the_steps_of_each(steps_b, heading, row, capsys):
  a = [dict(update=k, steps=100 * k, episode_return=float(k)) for k in (1, 2, 3)]
  b = [dict(update=k, steps=100 * k + steps_b, episode_return=None) for k in (1, 2)]
  compare.print_curves(a, b)
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert (lines[0], lines[-1], len(lines)) == (heading, row, 3)


def test_every_verb_has_a_module_and_every_module_a_verb():
  modules = {path.stem for path in Path(main.__file__).parent.glob('[!_]*.py')}
  assert modules - {'main', 'arguments', 'deep', 'remake', 'runs'} == set(main.VERBS)


@pytest.mark.parametrize('word, message', [
    ('evalute', 'evalute: no such command; did you mean evaluate?'),
    ('Rerun', 'Rerun: no such command; did you mean rerun?'),
    ('zzz', 'zzz: no such command; there are train, evaluate, export, compare, report, rerun, '
            'sweep, launch, configs, envs, metrics'),
    ('configs/impala_catch.py', 'configs/impala_catch.py: no such command; to train with this '
                                'config: podracer_jit --config=configs/impala_catch.py'),
    ('ppo_cartpole', 'ppo_cartpole: no such command; to train with this config: podracer_jit '
                     '--config=ppo_cartpole')])
def test_an_unknown_verb_gives_one_line_and_exit_code_2(word, message, capsys):
  assert main.main(['podracer_jit', word, '--workdir=x']) == 2
  out, err = capsys.readouterr()
  assert not out and err == f'podracer_jit: {message}\n'


@pytest.mark.parametrize('args', [[], ['--config=configs/impala_catch.py'], ['--distributed']])
def test_without_a_verb_the_command_trains(args, monkeypatch):
  monkeypatch.setattr(train, 'main', lambda argv, began_s: argv)
  assert main.main(['podracer_jit', *args]) == ['podracer_jit', *args]


@pytest.mark.parametrize('args, message', [
    (['evaluate'], '--workdir is needed: podracer_jit evaluate --workdir=runs/pong'),
    (['evaluate', '--workdir=gs://bucket/x'], 'gs://bucket/x: is an address, not a path'),
    (['export', '--workdir=x'], '--workdir and --out are needed'),
    (['compare', 'runs/a'], 'two workdirs are needed'),
    (['compare', 'runs/nowhere', 'b'], 'compare: runs/nowhere does not exist'),
    (['evaluate', '--workdir=x', '--num_episodes=some'], "--num_episodes=some: must be a whole "
                                                         "number, got 'some'"),
    (['evaluate', '--workdir=x', '--video='], '--video: has no value'),
    (['report', 'x', '--title='], '--title: has no value'),
    (['sweep', '--config=ppo_cartpole', '--out=x', '--tasks='], '--tasks: has no value'),
    (['sweep', '--config=ppo_cartpole', '--out=x', '--tasks=,'], '--tasks: a name is empty'),
    (['sweep', '--config=ppo_cartpole', '--out=x', '--grid=total_steps=1e6'],
     "total_steps: must be a whole number, got '1000000.0'"),
    (['rerun', '--workdir=x'], '--workdir and --update are needed'),
    (['benchmark', '--config=configs/nope.py'], 'python -m benchmarks.parts'),
    (['tune', '--help'], 'a checkout of the repository, it is python -m benchmarks.tune'),
    (['launch', '-n', '0', '--', '--config=x'], 'the number of processes'),
    (['launch', '-n', '2', '--config=x'], 'the number of processes'),
    (['configs', 'atari'], 'no arguments'),
    (['envs', 'brekout'], 'brekout: there is no such family or task; did you mean Breakout-v5?'),
    (['envs', 'a', 'b'], 'one word'),
    (['envs', '--all'], 'one word')])
def test_bad_arguments_of_a_verb_give_one_line_and_exit_code_2(args, message, capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', sys.argv)  # the parser of configs sets it
  assert main.main(['podracer_jit', *args]) == 2
  out, err = capsys.readouterr()
  assert not out and err.count('\n') == 1
  assert err.startswith(f'podracer_jit {args[0]}: ') and message in err


def test_the_command_returns_the_exit_code_of_its_verb(tmp_path):
  done = run_python('compare', 'a', 'b', cwd=tmp_path)
  assert done.returncode == 2 and done.stderr.startswith('podracer_jit compare: ')


def test_a_closed_pipe_gives_no_traceback():
  line = f'{sys.executable} -P -m podracer_jit envs atari | head -n 1'
  done = subprocess.run(['bash', '-o', 'pipefail', '-c', line], capture_output=True, text=True,
                        env=QUICK, timeout=300, check=False)
  assert done.stdout.startswith('Adventure-v5') and done.stdout.count('\n') == 1
  assert done.returncode == 141 and not done.stderr


def test_verbs_do_not_import_more_than_they_need():
  """Parsing a command line must not wait for JAX, and only drawing may import matplotlib."""
  program = ('import importlib, sys\n'
             'from podracer_jit.cli import main\n'
             'for verb in ("configs", "launch"):\n'
             '  importlib.import_module(f"podracer_jit.cli.{verb}")\n'
             'assert not {"jax", "envpool", "absl"} & set(sys.modules)\n'
             'import envpool  # it imports parts of matplotlib itself\n'
             'sys.modules["matplotlib"] = None  # an import of it fails from here on\n'
             'for verb in main.VERBS:\n'
             '  importlib.import_module(f"podracer_jit.cli.{verb}")\n')
  done = subprocess.run([sys.executable, '-P', '-W', 'ignore', '-c', program], capture_output=True,
                        text=True, env=QUICK, timeout=300, check=False)
  assert done.returncode == 0, done.stderr


def test_configs_lists_each_config_with_its_first_line(capsys):
  assert main.main(['podracer_jit', 'configs']) == 0
  lines = capsys.readouterr().out.splitlines()
  folder = Path(main.__file__).parents[1] / 'configs'
  assert [line.split()[0] for line in lines] == sorted(p.stem for p in folder.glob('[!_]*.py'))
  assert dict(line.split(None, 1) for line in lines)['apex_dqn_catch'] == (
      'Ape-X DQN on Catch: solved in seconds.')
  assert all(configs.shipped().values())


def test_envs_counts_the_tasks_of_each_family(capsys):
  assert main.main(['podracer_jit', 'envs']) == 0
  counts = {line.split()[0]: int(line.split()[1]) for line in capsys.readouterr().out.splitlines()}
  families = tasks_by_family()
  assert counts == {family: len(tasks) for family, tasks in families.items()}
  tasks = [task for names in families.values() for task in names]
  assert len(tasks) == len(set(tasks)) == sum(counts.values())
  kinds = {'gymnax', 'gymnasium'}
  if importlib.util.find_spec('mujoco_playground'):
    kinds.add('playground')
  assert set(envpool_envs.families()) | kinds == set(families)
  assert 'Pong-v5' in families['atari'] and 'Ant-v4' in families['mujoco.gym']


@pytest.mark.parametrize('word, task, line', [
    ('breakout', 'Breakout-v5', 'atari 4 x 84 x 84 uint8 4 actions'),
    ('Pendulum-v1', 'Pendulum-v1', 'classic_control 3 float32 1 number from -2 to 2'),
    ('gym', 'HalfCheetah-v4', 'mujoco.gym 17 float32 6 numbers from -1 to 1'),
    ('pgx', 'Chess-v1', 'pgx - has several players'),
    ('gymnax', 'gymnax:Pendulum-v1', 'gymnax 3 float32 1 number from -2 to 2'),
    ('gymnax', 'gymnax:Breakout-MinAtar', 'gymnax 10 x 10 x 4 float32 3 actions'),
    ('CartPole', 'gymnasium:CartPole-v1', 'gymnasium 4 float32 2 actions'),
    ('toy_text', 'FrozenLake-v1', 'toy_text 16 uint8 4 actions'),
    ('jumanji', 'BinPack-v2', "jumanji 1180 float32 40 x 20 choices, if env.action_mask is ''")])
def test_envs_describes_tasks_or_gives_the_reason(word, task, line, capsys):
  assert main.main(['podracer_jit', 'envs', word]) == 0
  lines = [' '.join(x.split()) for x in capsys.readouterr().out.splitlines()]
  assert f'{task} {line}' in lines
  families = tasks_by_family()
  listed = [x.split()[0] for x in lines]
  if word in families:
    assert listed == families[word]
  elif word == 'gym':
    assert listed == families['mujoco.gym']
  else:
    assert all(word.lower() in x.lower() for x in listed)


def test_mujoco_matches_all_mujoco_families():
  families = tasks_by_family()
  matching = {family for _, family in envs.matching(families, 'MuJoCo')}
  assert matching == {family for family in families if family.startswith('mujoco.')}


def test_a_playground_task_is_listed_beside_those_of_envpool(capsys):
  extras.skip_without('ppo_playground')
  assert main.main(['podracer_jit', 'envs', 'CartpoleBalance']) == 0
  lines = [' '.join(x.split()) for x in capsys.readouterr().out.splitlines()]
  described = 'playground 5 float32 1 number from -1 to 1'
  assert f'playground:CartpoleBalance {described}' in lines
  assert f'playground:CartpoleBalanceSparse {described}' in lines
  assert 'CartpoleBalance-v1 mujoco.dmc 5 float32 1 number from -1 to 1' in lines


@pytest.mark.parametrize('error, message', [
    (RuntimeError('no such file.\nTry another. Or none.'), '- no such file'),
    (ImportError(), '- ImportError'),
    (ValueError('x' * 200), '- ' + 'x' * 77 + '...')])
def test_a_task_that_cannot_be_made_has_a_short_reason(error, message, monkeypatch):
  def refuse(task, options):
    raise error

  monkeypatch.setattr(envpool_envs, 'make_spec', refuse)
  assert envs.describe('Any-v0') == message


@pytest.fixture
def script(tmp_path):
  """Returns a function that runs scripts/train with a Python that only prints its arguments."""
  (tmp_path / 'scripts').mkdir()
  shutil.copy(ROOT / 'scripts' / 'train', tmp_path / 'scripts')
  python = tmp_path / 'python'
  python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
  python.chmod(0o755)
  (tmp_path / 'scripts' / '_venv').write_text(f'python={python}\n')

  def run(*args):
    done = subprocess.run([tmp_path / 'scripts' / 'train', *args], capture_output=True, text=True,
                          timeout=30, check=True)
    words = done.stdout.splitlines()
    assert words[:3] == ['-P', '-m', 'podracer_jit']
    return words[3:]

  return run


PONG = '--config=configs/pong_laptop.py'


@pytest.mark.parametrize('args, passed', [
    ([], [PONG]),
    (['--workdir=x'], [PONG, '--workdir=x']),
    (['--config=a.py', '--workdir=x'], ['--config=a.py', '--workdir=x']),
    (['-config', 'a.py'], ['-config', 'a.py']),
    (['--help'], ['--help']),
    (['evaluate', '--workdir=x'], ['evaluate', '--workdir=x']),
    (['launch', '-n', '2', '--', '--workdir=x'], ['launch', '-n', '2', '--', '--workdir=x']),
    (['configs'], ['configs']),
    (['evalute'], ['evalute'])])
def test_the_script_passes_verbs_through(script, args, passed):
  assert script(*args) == passed


@pytest.mark.parametrize('args, extras', [
    ([], 'cuda'), (['report', 'runs'], 'cuda report'),
    (['--config=pqn_minatar:smoke'], 'cuda gymnax'),
    (['--config=configs/pqn_minatar.py'], 'cuda gymnax'),
    (['--config', 'pqn_minatar'], 'cuda gymnax'),
    (['--config=impala_catch', '--config.env.task=gymnax:CartPole-v1'], 'cuda gymnax'),
    (['--config=mine.py:smoke'], 'cuda playground wandb'),
    (['--config=missing.py', '--workdir=--x'], 'cuda')])
def test_the_script_adds_what_arguments_and_configs_need(script, args, extras, tmp_path,
                                                         monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'podracer_jit').mkdir()
  (tmp_path / 'podracer_jit' / 'configs').symlink_to(ROOT / 'podracer_jit' / 'configs')
  (tmp_path / 'mine.py').write_text(
      "  config.env.task = 'playground:CartpoleBalance'  # a task\n"
      '  config.log.tracker="wandb"\n'
      "  # config.env.task = 'gymnax:CartPole-v1'\n")
  with open(tmp_path / 'scripts' / '_venv', 'a') as file:
    file.write(f'echo "${{extras[*]}}" > {tmp_path}/extras\n')
  script(*args)
  assert (tmp_path / 'extras').read_text().strip() == extras


def test_launch_does_not_import_from_the_current_directory(tmp_path):
  """`launch` uses -P, so that processes import nothing from the current directory."""
  (tmp_path / 'podracer_jit.py').write_text('print("not this one")\n')
  done = run_python('launch', '-n', '1', '--', '--nonsense', cwd=tmp_path)
  assert done.returncode == 2 and '[0] podracer_jit: Unknown command line flag' in done.stdout
  assert 'not this one' not in done.stdout


FAKE_PYTHON = '''#!/usr/bin/env bash
# Stands for a Python whose pip takes some seconds.
case "$*" in
  *'print("%d.%d" %'*) echo 3.12 ;;
  *'print("%d.%d.%d" %'*) echo 3.12.1 ;;
  *sys.version_info*) exit 0 ;;
  *'import venv'*) exit 0 ;;
  '-m venv'*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  '-m pip'*)
    echo "$*" >> {calls}
    echo 'Downloading jaxlib'
    echo 'WARNING: of no interest'
    if [[ {fails} == yes ]]; then echo 'ERROR: no wheel'; exit 1; fi
    sleep {seconds} ;;
esac
'''


@pytest.fixture
def set_up(tmp_path):
  """Returns a function that sources scripts/_venv with extras, and a Python that installs nothing.

  It returns the completed process, and the last word of each call of pip.
  """
  (tmp_path / 'scripts').mkdir()
  for name in ('scripts/_venv', 'requirements-3.12.lock', 'setup.cfg'):
    shutil.copy(ROOT / name, tmp_path / name)
  calls = tmp_path / 'calls'
  python = tmp_path / 'python'

  def run(*extras, fails='no', terminal=False, **variables):
    calls.write_text('')
    python.write_text(FAKE_PYTHON.replace('{calls}', str(calls)).replace('{fails}', fails)
                      .replace('{seconds}', '5' if terminal else '2'))
    python.chmod(0o755)
    command = (f'set -euo pipefail; extras=({" ".join(extras)}); '
               f'source {tmp_path}/scripts/_venv; echo "python: $python"')
    command = ['bash', '-c', command]
    if terminal:
      command = ['script', '-qec', shlex.join(command), '/dev/null']
    environment = os.environ | {'PYTHON': str(python), 'JAX_PLATFORMS': 'cpu'} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    installations = calls.read_text().splitlines()
    assert all(f'-c {tmp_path}/requirements-3.12.lock ' in line for line in installations)
    return done, [line.split()[-1].removeprefix(str(tmp_path)) for line in installations]

  return run


def test_the_first_training_installs_what_it_needs_and_tests_add_the_rest(set_up):
  done, installed = set_up('cuda', 'gymnax')
  assert done.returncode == 0, done.stderr
  assert installed == ['setuptools', '', '[gymnax]']
  lines = [line.removeprefix('podracer_jit: ') for line in done.stderr.splitlines()]
  assert lines[:2] == ['Setting up .venv, once: it takes 1.9 GB, and a minute or more.',
                       'Adding the extra gymnax to .venv, once: it takes 0.1 GB.']
  assert [line.partition(' ')[0] for line in lines[2:]] == ['[1/4]', '[2/4]', '[3/4]', '[4/4]']
  assert set_up('cuda', 'gymnax')[1] == []  # once
  assert set_up('test')[1] == ['[test]'] and set_up('test')[1] == []
  assert set_up('cuda')[1] == []


@pytest.mark.skipif(not shutil.which('script'), reason='needs a terminal')
def test_the_installation_shows_its_seconds_and_what_it_does(set_up):
  done, _ = set_up(terminal=True)
  assert done.returncode == 0, done.stdout
  assert '[3/3] installing the package and all that it needs ...' in done.stdout
  assert re.search(r'[1-5] s  Downloading jaxlib', done.stdout)


def test_a_failed_installation_shows_the_error_and_begins_anew(set_up):
  done, _ = set_up(fails='yes')
  assert done.returncode == 1
  assert 'ERROR: no wheel' in done.stderr and 'WARNING' not in done.stderr
  assert done.stderr.splitlines()[-1] == 'podracer_jit: could not install setuptools'
  assert set_up()[1] == ['setuptools', '']
