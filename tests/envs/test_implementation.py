"""The side effects that EnvPool's calls declare."""

import jax
import jax.numpy as jnp
import pytest

from podracer_jit.envs import envpool_envs
from podracer_jit.envs.seeds import env_seeds
from tests.envs.test_envs import ONE_THREAD

pytestmark = pytest.mark.implementation


def test_a_call_has_side_effects_for_xla_and_no_effects_for_jax():
  """XLA must keep each call. With an effect, JAX would dispatch the program through slow Python."""
  vector_env = envpool_envs.EnvPoolVectorEnv('CartPole-v1', {}, env_seeds(1, 0, 0, 2), ONE_THREAD)
  step = jax.jit(lambda token, action: vector_env.recv(*vector_env.send(token, (), action)))
  traced = step.trace(jnp.array(vector_env.handle), jnp.zeros(2, jnp.int32))
  assert not traced.jaxpr.effects
  assert traced.lower().as_text().count('has_side_effect = true') == 2
  vector_env.close()
