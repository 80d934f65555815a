"""An actor's state has what its environments were sent in the last rollout."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from podracer_jit import losses
from podracer_jit.actor import rollouts
from podracer_jit.actor.acting import FirstReady, InStep
from podracer_jit.envs.protocol import EnvSpec, VectorEnvOfShapes
from podracer_jit.experiment import build
from podracer_jit.losses.algorithm import ForActors
from tests.made import SPEC, bound
from tests.runs import prepared
from tests.schemes.test_function_envs import experiment as of_functions

NUM_ENVS = 3
SPECS = {
    'two actions': (SPEC, np.uint8),
    '256 actions': (SPEC._replace(num_actions=256), np.uint8),
    '257 actions': (SPEC._replace(num_actions=257), np.uint16),
    'numbers': (SPEC._replace(num_actions=0, action_choices=(3, 300)), np.uint16),
    'a vector': (EnvSpec('x', (4,), np.dtype(np.float32), 0, (-1.0, 0.0), (1.0, 7.0), 1, 0),
                 np.float32)}


class Spy(VectorEnvOfShapes):
  """Environments that observe zeros, and record each action."""

  def __init__(self, spec):
    super().__init__(spec, NUM_ENVS, 0)
    self.actions = []

  def send(self, token, state, action, env_id=None):
    jax.debug.callback(lambda x: self.actions.append(np.array(x)), action, ordered=True)
    return super().send(token, state, action, env_id)


@pytest.mark.parametrize('name', SPECS)
def test_the_actions_that_were_sent_are_noted_in_the_smallest_type(name):
  spec, dtype = SPECS[name]
  algorithm = bound(losses.PPO(), spec=spec)
  spies = [Spy(spec), Spy(spec)]
  acting = InStep(algorithm, None, None)
  state = acting.initial_state(spies, list(jax.random.split(jax.random.key(1))), 0)
  rollout = jax.jit(acting.rollout(spies))
  given = ForActors(algorithm.init(jax.random.key(0)))
  notes = []
  for _ in range(2):
    state, _ = rollout(given, state)
    jax.effects_barrier()
    for spy, sent in zip(spies, rollouts.sent_by(state), strict=True):
      assert sent.dtype == dtype and len(sent) == 8
      assert_array_equal(sent, np.array(spy.actions[-8:]))  # of the last rollout only
      notes.append(np.asarray(sent))
  assert len({x.tobytes() for x in notes}) == 4
  assert len(spies[0].actions) == 16


def test_nothing_is_noted_for_functions_nor_if_steps_wait_for_some_environments_only():
  algorithm = bound(losses.PPO())
  functions = prepared(of_functions(scheme='sync'))
  spy = Spy(SPEC)
  keys = [jax.random.key(0)]
  state = FirstReady(algorithm).initial_state([spy], keys, 0)
  assert rollouts.sent_by(state) == []
  shapes = build.shapes_of_pool(functions.experiment, functions.acting)
  assert shapes.envs[0].simulator is not None and rollouts.sent_by(shapes) == []
