"""PQN on CartPole: Q-learning without a replay, in one program.

The settings are those of the authors' program (config/alg/pqn_cartpole.yaml) except for the layers
of 128 (256), the learning rate of 5e-4 (1e-4), the last epsilon of 0.05 (0.2) and the discount of
0.98 (0.99); rewards are not multiplied by 0.1.

podracer_jit --config=configs/pqn_cartpole.py --workdir=runs/pqn_cartpole
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('pqn', 'mlp', 'radam', scheme='fused')
  config.env.task = 'CartPole-v1'
  config.env.num_envs = 32
  config.total_steps = 500_000
  config.unroll_length = 64
  config.num_minibatches = 16
  config.num_epochs = 4
  config.microbatch_rows = -1
  config.network.hidden = (128, 128)
  config.network.activation = 'relu'
  config.network.layer_norm = True
  config.loss.discount = 0.98
  config.loss.trace_lambda = 0.95
  config.loss.epsilon = 'linear:1:0.05:0.2'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.max_grad_norm = 10.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 8_000
  return config
