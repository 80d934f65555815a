"""The programs in the docs run, every config runs, and everything that the docs name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podracer_jit import experiment
from podracer_jit.run import main
from tests import extras, processes

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / 'README.md', ROOT / 'ARCHITECTURE.md', ROOT / 'CHANGELOG.md',
         ROOT / 'benchmarks' / 'gpu_day' / 'README.md', *sorted((ROOT / 'docs').glob('*.md')),
         *sorted((ROOT / 'podracer_jit' / 'configs').glob('[!_]*.py'))]


def blocks(path, language):
  return re.findall(rf'```{language}\n(.*?)```', path.read_text(), re.DOTALL)


def test_the_readmes_program_learns_catch(tmp_path):
  _, program = blocks(ROOT / 'README.md', 'python')
  result = processes.run([sys.executable, '-c', program], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert float(result.stdout.split()[-1]) > 0  # random play: -0.6


def test_the_readmes_program_that_trains_from_python(tmp_path):
  program, _ = blocks(ROOT / 'README.md', 'python')
  result = processes.run([sys.executable, '-c', program], cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert 'stopped at update' in result.stdout  # by the callback
  assert float(result.stdout.split()[-1]) > 100  # random play: 22
  assert (tmp_path / 'runs' / 'agent' / 'parameters.safetensors').is_file()


def test_the_readmes_commands_for_the_life_of_a_run(tmp_path):
  """Runs the commands of the README in their order."""
  text = (ROOT / 'README.md').read_text().partition('## The life of a run')[2]
  block = re.search(r'```sh\n(.*?)```', text, re.DOTALL)[1]
  # The shell prints the commands instead of running them.
  lines = subprocess.run(['bash', '-euc', block.replace('scripts/train', 'echo')],
                         capture_output=True, text=True, check=True).stdout.splitlines()
  assert len(lines) == block.count('scripts/train') == 5
  output = ''
  for line in lines:
    result = processes.run(processes.command(*line.split()), cwd=tmp_path)
    # `compare` is the one command that may fail, since the two runs differ.
    assert result.returncode == 0 or line.startswith('compare '), result.stderr
    output += result.stdout + result.stderr
  for message in ('changed before update 10: total_steps: 5000 before, 8000 since',
                  'it is annealed over 8,000 steps instead of 5,000',
                  'changed before update 15: optimizer.learning_rate: 0.001 before, 0.0001 since',
                  'the run begins with parameters, optimizer of', 'history: B began with'):
    assert message in output, message


@pytest.mark.parametrize('path', TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_that_the_docs_name_exists(path):
  text = path.read_text()
  for name in re.findall(r'configs/(\w+\.py)', text):
    assert (ROOT / 'podracer_jit' / 'configs' / name).is_file(), name
  for name in re.findall(r'scripts/(\w+(?:\.(?:py|sh))?)', text):
    assert (ROOT / 'scripts' / name).is_file(), name
  for verb in re.findall(r'(?:^|`)(?:scripts/train|podracer_jit) ([a-z]\w*)', text, re.MULTILINE):
    assert verb in main.VERBS, verb
  for name in re.findall(r'-m (benchmarks\.[\w.]+)', text):
    module = ROOT / name.replace('.', '/')
    assert module.with_suffix('.py').is_file() or (module / '__main__.py').is_file(), name
  for name in re.findall(r'podracer_jit/[\w/]+\.py', text):
    assert (ROOT / name).is_file(), name
  for command in re.findall(r'^(scripts/\S+)', '\n'.join(blocks(path, 'sh')), re.MULTILINE):
    assert os.access(ROOT / command, os.X_OK), command
  config = experiment.config('ppo', 'mlp', 'adam').to_dict()
  with_replay = experiment.config('dqn', 'mlp', 'adam').to_dict()
  config['loss'] |= with_replay['loss']
  config['replay'] = with_replay['replay']
  config['network'] |= experiment.config('ppo', 'nature_cnn', 'adam').to_dict()['network']
  for field in re.findall(r'--config\.([a-z_.]+)', text):
    part = config
    if field.startswith('env.') or field.endswith('.'):
      continue  # EnvPool's own; "under --config.env. any option"
    for key in field.split('.'):
      assert key in part, field
      part = part[key]


def test_no_text_installs_the_package_by_its_name():
  """Nobody owns that name on PyPI, so somebody else could; `pip install .` is in a checkout."""
  files = [*TEXTS, *(ROOT / 'podracer_jit').rglob('*.py'), *(ROOT / 'benchmarks').rglob('*.py'),
           *(ROOT / 'examples').rglob('*.py'), *(path for path in (ROOT / 'scripts').iterdir())]
  for path in files:
    for line in path.read_text().splitlines():
      named = re.search(r'pip install[^;#|]*\bpodracer[-_]jit\b(?![/.])', line)
      assert not named, f'{path}: {line}'


def test_all_islands_are_explained():
  text = (ROOT / 'ARCHITECTURE.md').read_text()
  files = [path.read_text() for path in (ROOT / 'podracer_jit').rglob('*.py')]
  names = {name for file in files for name in re.findall(r"\bisland\('(\w+)'", file)}
  assert names
  assert {name for name in names if f'`{name}`' not in text} == set()


@pytest.mark.quick
@pytest.mark.parametrize('path', [path for path in TEXTS if path.suffix == '.md'],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
  for target in re.findall(r'\]\(([^)]+)\)', path.read_text()):
    if target.startswith('http'):
      continue
    name, _, anchor = target.partition('#')
    file = path.parent / name if name else path
    assert file.exists(), target
    if anchor:
      headings = re.findall(r'^#+ (.*)', file.read_text(), re.MULTILINE)
      anchors = [re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings]
      assert anchor in anchors, target


@pytest.mark.parametrize('name', sorted(
    p.stem for p in (ROOT / 'podracer_jit' / 'configs').glob('[!_]*.py')))
def test_every_config_makes_its_smoke_run(name, tmp_path):
  extras.skip_without(name)
  result = processes.run(processes.command(
      f'--config=configs/{name}.py:smoke', f'--workdir={tmp_path}/run'))
  assert result.returncode == 0, result.stderr
  assert 'finished at update' in result.stdout


def test_the_table_of_same_bits_is_up_to_date():
  done = subprocess.run([sys.executable, '-m', 'tests.same_bits'], capture_output=True, text=True,
                        timeout=300, cwd=ROOT, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout in (ROOT / 'docs' / 'exactness.md').read_text()
