"""Plays a task of Gymnasium with an exported agent, without podracer_jit.

podracer_jit export --workdir=runs/cartpole --out=cartpole
python examples/load_exported.py cartpole

It needs jax, flatbuffers and safetensors, and here gymnasium. agent.json explains the arguments.
"""

import hashlib
import json
import pathlib
import sys

import gymnasium
import jax
import numpy as np
from safetensors.numpy import load_file

folder = pathlib.Path(sys.argv[1])
for name, entry in json.loads((folder / 'manifest.json').read_bytes())['files'].items():
  if hashlib.sha256((folder / name).read_bytes()).hexdigest() != entry['sha256']:
    sys.exit(f'{folder / name} is not what was exported')
about = json.loads((folder / 'agent.json').read_bytes())
parameters = load_file(folder / 'parameters.safetensors')
act = jax.jit(jax.export.deserialize(bytearray((folder / 'drawn.jax').read_bytes())).call)

env = gymnasium.make(about['task'].removeprefix('gymnasium:'))
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
print(f'{about["task"]} after update {about["update"]}: return {score:g} in {steps} steps')
