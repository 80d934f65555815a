"""Plays a task of Gymnasium with an exported agent, without podracer_jit.

podracer_jit export --workdir=runs/cartpole --out=cartpole
python examples/load_exported.py cartpole

It needs jax, flatbuffers and safetensors, and here gymnasium. agent.json explains the arguments.
A task like gymnasium:ale_py:ALE/Pong-v5 runs a module, so it needs --allow_modules=ale_py.
"""

import hashlib
import json
import pathlib
import shlex
import sys

import gymnasium
import jax
import numpy as np
from safetensors.numpy import load_file


def check(folder):
  """Ends the program if the folder, which may be a stranger's, is not as it was exported.

  Only regular files inside of the folder are read, no links, pipes or devices; sizes come first.
  """
  sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob('*')
           if path.is_file() and not path.is_symlink()}
  if sizes.get('manifest.json', 2**20) >= 2**20:
    sys.exit(f'{folder} is not an exported agent')
  files = json.loads((folder / 'manifest.json').read_bytes())['files']
  needed = {'agent.json', 'parameters.safetensors', 'drawn.jax'} - files.keys()
  wrong = [name for name, entry in files.items() if sizes.get(name) != entry['bytes']]
  for name in [*needed, *wrong, *files]:
    if name in needed or name in wrong or files[name]['sha256'] != hashlib.sha256(
        (folder / name).read_bytes()).hexdigest():
      sys.exit(f'{folder}: {ascii(name)[1:-1]} is not what was exported')


folder = pathlib.Path(sys.argv[1])
check(folder)
about = json.loads((folder / 'agent.json').read_bytes())
parameters = load_file(folder / 'parameters.safetensors')
act = jax.jit(jax.export.deserialize(bytearray((folder / 'drawn.jax').read_bytes())).call)

task = about['task'].removeprefix('gymnasium:')
flag = f'--allow_modules={task.rpartition(":")[0]}'
if ':' in task and flag not in sys.argv:
  sys.exit(f'{ascii(task)} runs a module; if you trust it: {shlex.quote(ascii(flag)[1:-1])}')
options = about['env'] if about['task'].startswith('gymnasium:') else {}
env = gymnasium.make(task, **options)
obs, _ = env.reset(seed=0)
state = [np.zeros((1, *part['shape']), part['dtype']) for part in about['state']]
score = 0.0
steps = 0
over = False
while not over:
  batch = jax.tree.map(lambda x: np.asarray(x)[None], obs)
  key = np.array([0, steps], np.uint32)
  action, state, _ = act(parameters, batch, state, np.array([steps == 0]), key)
  obs, reward, terminated, truncated, _ = env.step(np.asarray(action[0]))
  score += reward
  steps += 1
  over = terminated or truncated
print(f'{ascii(about["task"])[1:-1]} after update {ascii(about["update"])}: '
      f'return {score:g} in {steps} steps')
