"""Deep reinforcement learning at the speed of the simulator; names of the Python API.

  import podracer_jit as pj
  run = pj.train(pj.load_config('ppo_cartpole'), 'runs/cartpole')
  action, state = run.agent.act(obs)

`api.py` explains the functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from podracer_jit import errors as errors

if TYPE_CHECKING:
  from podracer_jit import testing as testing
  from podracer_jit.api import Evaluation as Evaluation
  from podracer_jit.api import Trained as Trained
  from podracer_jit.api import choose as choose
  from podracer_jit.api import evaluate as evaluate
  from podracer_jit.api import load as load
  from podracer_jit.api import load_config as load_config
  from podracer_jit.api import prepare as prepare
  from podracer_jit.api import train as train
  from podracer_jit.errors import CallbackFailed as CallbackFailed
  from podracer_jit.experiment.config_dict import config as config
  from podracer_jit.play.agent import Agent as Agent
  from podracer_jit.training.sinks import STOP as STOP
  from podracer_jit.training.sinks import Callback as Callback
  from podracer_jit.training.sinks import Saved as Saved
  from podracer_jit.training.sinks import Sink as Sink
  from podracer_jit.training.sinks import Start as Start

# Imported on first use: workers of environments import this package without JAX.
_MODULES = {
    'podracer_jit.play.agent': ('Agent',),
    'podracer_jit.api': ('Evaluation', 'Trained', 'choose', 'evaluate', 'load', 'load_config',
                         'prepare', 'train'),
    'podracer_jit.training.sinks': ('STOP', 'Callback', 'Saved', 'Sink', 'Start'),
    'podracer_jit.errors': ('CallbackFailed',),
    'podracer_jit.experiment.config_dict': ('config',),
}
__all__ = sorted(['errors', 'testing', *(name for names in _MODULES.values() for name in names)])

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

  def __getattr__(name: str) -> Any:
    """Returns a name of the Python API."""
    if name == 'testing':
      return importlib.import_module('podracer_jit.testing')
    for module, names in _MODULES.items():
      if name in names:
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  """Returns the names of the Python API, for completion."""
  return sorted({*globals(), *__all__})
