"""The pages of docs/ that quote the code: messages, names of fields, pictures; and the tutorial."""

import ast
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import podracer_jit as pj
from benchmarks import pictures
from podracer_jit import experiment
from podracer_jit.losses import ALGORITHMS
from podracer_jit.runtime import coordinator
from tests import processes
from tests.rooms import ROOT, TREES

DOCS = ROOT / 'docs'
VALUE = '\0'  # stands for a value in a message


def texts_of_the_source() -> list[str]:
  """Returns all strings of the package and its scripts; VALUE stands for what is filled in."""
  texts = []
  for module, tree in TREES.items():
    def part(node, module=module):
      if isinstance(node, ast.Constant):
        return str(node.value)
      # The one flag that messages of several lines begin with.
      is_flag = module == 'runtime.coordinator' and getattr(node.value, 'id', '') == 'FLAG'
      return coordinator.FLAG if is_flag else VALUE

    for node in ast.walk(tree):
      if isinstance(node, ast.JoinedStr):
        texts.append(''.join(map(part, node.values)))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(re.sub(r'%(\.0f|s|d)', VALUE, node.value))  # of a logger
  for name in ('_venv', 'train'):
    script = re.sub(r'" *\\\n *"', ' ', (ROOT / 'scripts' / name).read_text())
    texts.append(re.sub(r'\$\{[^}]*\}|\$\w+', VALUE, script))
  return [re.sub(f'{VALUE}+', VALUE, text) for text in texts]


def quoted_messages() -> list[str]:
  """Returns the first cells of the tables of docs/troubleshooting.md."""
  return re.findall(r'^\| `([^`]+)` \|', (DOCS / 'troubleshooting.md').read_text(), re.MULTILINE)


def is_quoted(message: str, texts: list[str]) -> bool:
  """Returns whether a text of the source has a message, whose '...' stand for values.

  Values may be empty at either end, and one '...' may stand for a value and the text beside it.
  """
  parts = [part for part in message.split('...') if part]
  pattern = re.compile(f'[^\\n]*{VALUE}[^\\n]*'.join(map(re.escape, parts)))
  return any(pattern.search(text) for text in texts)


def test_troubleshooting_quotes_the_messages_of_the_code():
  texts = texts_of_the_source()
  messages = quoted_messages()
  assert len(messages) > 40
  assert [message for message in messages if not is_quoted(message, texts)] == []


@pytest.mark.parametrize('message, expected', [
    ('--config=...: there is no such file, and no shipped config of that name', True),
    ('--config=...: there is no such fiel, and no shipped config of that name', False),
    ('env.task: ... has several players; single-player tasks only for now', True),
    ('env.task: Pong-v5 has several players; single-player tasks only for now', False)])
def test_a_message_must_be_quoted_exactly(message, expected):
  assert is_quoted(message, texts_of_the_source()) is expected


def fields_of_all_configs() -> set[str]:
  """Returns the names of the fields of all algorithms, with dots."""
  def names(part, prefix=''):
    for key, value in part.items():
      yield from names(value, f'{prefix}{key}.') if hasattr(value, 'items') else [prefix + key]

  networks = ('mlp', 'nature_cnn')
  return {name for loss in ALGORITHMS for network in networks
          for name in names(experiment.config(loss, network, 'adam').to_dict())}


def test_names_of_other_programs_lead_to_fields():
  rows = [row for row in (DOCS / 'coming_from.md').read_text().splitlines()
          if row.startswith('|') and 'field here' not in row and '---' not in row]
  assert len(rows) > 50
  known = fields_of_all_configs()
  for row in rows:
    cell = row.strip('|').split('|')[-1]
    fields = re.findall(r'`([a-z_]+(?:\.[a-z_]+)*)(?:=[^`]*)?`', cell)
    assert fields or 'none' in cell or '`--distributed`' in cell, row
    assert not set(fields) - known, row


def test_the_glossary_explains_each_word_once_and_in_order():
  words = re.findall(r'^- \*\*([\w ]+)\.\*\* ', (DOCS / 'glossary.md').read_text(), re.MULTILINE)
  assert words == sorted(set(words), key=str.lower) and len(words) > 25
  assert {'Island', 'Segment', 'Shard', 'Group', 'Receipt', 'Canary', 'CGD', 'GUD'} <= set(words)


def test_the_picture_of_a_round_is_what_the_script_draws():
  """The file is generated; `python -m benchmarks.pictures flow` draws it."""
  assert (DOCS / 'images' / 'data_flow.svg').read_text() == pictures.flow()


def test_the_picture_of_mujoco_has_the_figures_of_the_results():
  drawn = (DOCS / 'images' / 'mujoco.svg').read_text()
  assert drawn == pictures.mujoco()
  assert 'HalfCheetah-v4' in drawn and '2,120 ± 674 (10)' in drawn and '1,443 ± 46 (3)' in drawn


def test_the_animation_of_an_agent(tmp_path):
  """Films of two sizes and rates become one animation."""
  np = pytest.importorskip('numpy')
  image = pytest.importorskip('PIL.Image')
  imageio_ffmpeg = pytest.importorskip('imageio_ffmpeg')
  (tmp_path / 'metrics.jsonl').write_text(''.join(
      json.dumps({'steps': 1000 * i, 'episode_return': None if i == 0 else i}) + '\n'
      for i in range(9)))
  films = []
  for name, size, rate in (('before', 64, 10), ('after', 128, 50)):
    films.append(tmp_path / f'{name}.mp4')
    writer = imageio_ffmpeg.write_frames(str(films[-1]), (size, size), fps=rate)
    writer.send(None)
    for shade in range(0, 250, 25):
      writer.send(np.full((size, size, 3), shade, np.uint8))
    writer.close()
  pictures.agent(tmp_path, *films, tmp_path / 'agent.webp', seconds=1.0)
  animation = image.open(tmp_path / 'agent.webp')
  assert animation.n_frames == 12
  assert (tmp_path / 'agent.webp').stat().st_size < 500_000


def test_the_pages_are_short():
  assert len((ROOT / 'ARCHITECTURE.md').read_text().split()) <= 3000


# The tutorial, with fewer steps than a reader makes.
SMOKE = {'--config=ppo_cartpole': '--config=ppo_cartpole:smoke', '--config=mine.py':
         '--config=mine.py:smoke', '--seeds=1:3': '--seeds=1:2'}


@pytest.mark.full
def test_the_tutorial(tmp_path):
  """Runs the commands of the page in their order, in one folder."""
  text = (DOCS / 'tutorial.md').read_text()
  (module,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  (tmp_path / 'mine.py').write_text(module.replace('200_000', '5_000'))
  output = ''
  for block in re.findall(r'```sh\n(.*?)```', text, re.DOTALL):
    for written, shorter in SMOKE.items():
      block = block.replace(written, shorter)
    # The shell writes down the words of each command; what is not ours, it runs.
    script = block.replace('scripts/train', 'printf "%s\\n" --- ') + 'echo ---\n'
    words = subprocess.run(['bash', '-euc', script], cwd=tmp_path, capture_output=True, text=True,
                           check=True).stdout
    assert block.count('scripts/train') == words.count('---\n') - 1
    for command in words.split('---\n')[1:-1]:
      done = processes.run(processes.command(*command.splitlines()), cwd=tmp_path, timeout=300)
      assert done.returncode == 0, done.stdout + done.stderr
      output += done.stdout + done.stderr
  for message in ('runs/first has it all', 'mean, standard error', 'network.hidden', 'identical'):
    assert message in output, message
  assert (tmp_path / 'runs' / 'first' / 'video.mp4').is_file()
  assert (tmp_path / 'report_of_rates' / 'index.html').is_file()


def test_the_notebook(tmp_path):
  """Runs the cells of the notebook in their order; it shows no stored results."""
  cells = [cell for cell in json.loads((DOCS / 'tutorial.ipynb').read_text())['cells']
           if cell['cell_type'] == 'code']
  assert not any(cell['outputs'] for cell in cells)
  program = '\n'.join(''.join(cell['source']) for cell in cells)
  assert 'STEPS = 200_000' in program
  program = "import matplotlib\nmatplotlib.use('agg')\n" + program.replace('200_000', '5_000')
  done = processes.run([sys.executable, '-c', program], cwd=tmp_path, timeout=300)
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'equal in every update: True' in done.stdout
  assert "scheme: " in done.stdout and "'snyc'" in done.stdout  # refused


def test_the_live_block_is_filmed_at_the_pace_of_a_real_training(tmp_path):
  shown = pictures.filmed(pj.load_config('impala_catch:smoke'), tmp_path / 'run')
  assert len(shown) > 1 and shown[0][0] == 0
  drawn = pictures.live(shown)
  blocks = [''.join(text.itertext()) for text in ElementTree.fromstring(drawn).iter(
      '{http://www.w3.org/2000/svg}text')]
  assert 1 < len(blocks) <= len(shown)
  assert 'impala on Catch-v0' in blocks[-1] and 'of 5,000' in blocks[-1]
  # Without animation, the last one is visible.
  states = re.findall('visibility="(hidden|visible)"', drawn)
  assert states == ['hidden'] * (len(blocks) - 1) + ['visible']


def test_a_film_shows_each_block_as_long_as_it_was_there():
  blocks = [[f'block {i}', 'a', 'b', 'c'] for i in range(4)]
  drawn = pictures.live([(0.0, blocks[0]), (0.1, blocks[1]), (1.0, blocks[2]), (1.1, blocks[3])])
  # The second comes too soon after the first; the last one stays for three seconds: 4.1 in all.
  assert 'block 1' not in drawn and all(f'block {i}' in drawn for i in (0, 2, 3))
  times = re.findall('keyTimes="([^"]*)" dur="4.10s"', drawn)
  assert times == ['0.0000;0.2439', '0.0000;0.2439;0.2683', '0.0000;0.2683;1.0000']
