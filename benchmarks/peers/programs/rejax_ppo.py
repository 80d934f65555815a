"""PPO of rejax on an environment of gymnax, with the sizes and the loss of one of our configs.

rejax_ppo.py CONFIG RECORDS

rejax counts its own evaluations into `train`, so this program repeats `train_iteration` instead.
"""

import jax
import jax.numpy as jnp
from records import arguments
from rejax import PPO

ROWS_OF_A_CALL = 2**17  # so that a call is far longer than what Python adds to it


def main():
  """Trains until the process is ended."""
  config, records, _ = arguments()
  loss = config['loss']
  num_envs = config['env']['num_envs']
  num_steps = config['unroll_length']
  algorithm = PPO.create(
      env=config['env']['task'].removeprefix('gymnax:'), num_envs=num_envs, num_steps=num_steps,
      num_epochs=config['num_epochs'], num_minibatches=config['num_minibatches'],
      learning_rate=config['optimizer']['learning_rate'],
      max_grad_norm=config['optimizer']['max_grad_norm'], gamma=loss['discount'],
      gae_lambda=loss['gae_lambda'], clip_eps=loss['clip'], ent_coef=loss['entropy_coef'],
      vf_coef=loss['value_coef'],
      agent_kwargs=dict(hidden_layer_sizes=tuple(config['network']['hidden']), activation='tanh'))
  rows = num_envs * num_steps
  updates = max(1, ROWS_OF_A_CALL // rows)

  def iterate(state, _):
    return algorithm.train_iteration(state), None

  train = jax.jit(lambda state: jax.lax.scan(iterate, state, None, updates)[0], donate_argnums=0)
  # Copies: equal constants of a first state may share a buffer, which cannot be donated twice.
  state = jax.tree.map(jnp.array, algorithm.init_state(jax.random.key(0)))
  steps = 0
  while True:
    state = jax.block_until_ready(train(state))
    steps += updates * rows
    records.write(steps)


if __name__ == '__main__':
  main()
