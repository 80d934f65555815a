"""PQN on MinAtar with the authors' settings (2407.04811), in one program.

Two things differ from their program: the first weights are orthogonal instead of He's, and
observations, which are 0 or 1, are not divided by 255.

podracer_jit --config=configs/pqn_minatar.py --workdir=runs/pqn_minatar
podracer_jit --config=configs/pqn_minatar.py --workdir=runs/pqn_seeds --num_seeds=10
"""

from podracer_jit import experiment


def get_config(arg: str = ''):
  """Returns the config; with the argument `smoke` a run has a few updates only."""
  config = experiment.config('pqn', 'nature_cnn', 'radam', scheme='fused')
  config.env.task = 'gymnax:Breakout-MinAtar'
  config.env.num_envs = 128
  config.total_steps = 10_000_000
  config.unroll_length = 32
  config.num_minibatches = 32
  config.num_epochs = 2
  config.microbatch_rows = -1
  config.network.channels = (16,)
  config.network.kernels = (3,)
  config.network.strides = (1,)
  config.network.hidden = 128
  config.network.layer_norm = True
  config.loss.trace_lambda = 0.65
  config.loss.epsilon = 'linear:1:0.05:0.1'
  config.optimizer.learning_rate = 5e-4
  config.optimizer.max_grad_norm = 10.0
  if 'smoke' in experiment.arguments(arg, 'smoke'):
    config.total_steps = 8_000
    config.env.num_envs = 32
    config.num_minibatches = 4
  return config
