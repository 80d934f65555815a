"""PPO, SAC or TD3 of Stable-Baselines3 or SBX with the sizes and the loss of one of our configs.

stable.py CONFIG RECORDS sb3|sbx gymnasium|subproc|envpool

`gymnasium` steps environments in this process (`DummyVecEnv`; Atari by ale-py with the wrappers of
`make_atari_env`), `subproc` in a process each, and `envpool` by EnvPool.
"""

import importlib

import envpool
import numpy as np
from records import arguments
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import (
  DummyVecEnv,
  SubprocVecEnv,
  VecEnv,
  VecFrameStack,
  VecNormalize,
)


class EnvPoolVecEnv(VecEnv):
  """A pool of EnvPool as a vector environment of Stable-Baselines3.

  EnvPool resets an environment in the step after its last one. Stable-Baselines3 expects the first
  observation of the next episode at once, so environments whose episode is over are reset here.
  """

  def __init__(self, task, num_envs, **options):
    """Makes the pool."""
    self._pool = envpool.make_gymnasium(task, num_envs=num_envs, **options)
    space = self._pool.observation_space
    # EnvPool's observations of MuJoCo are float64; a network converts each minibatch.
    super().__init__(num_envs, space, self._pool.action_space)
    self._actions = None

  def reset(self):
    return self._pool.reset()[0]

  def step_async(self, actions):
    self._actions = np.asarray(actions, self.action_space.dtype)

  def step_wait(self):
    obs, reward, terminated, truncated, _ = self._pool.step(self._actions)
    done = terminated | truncated
    infos = [{} for _ in range(self.num_envs)]
    over = np.flatnonzero(done).astype(np.int32)
    if len(over):
      obs = obs.copy()
      for i in over:
        infos[i] = {'terminal_observation': obs[i].copy(),
                    'TimeLimit.truncated': bool(truncated[i] and not terminated[i])}
      obs[over] = self._pool.reset(over)[0]
    return obs, reward, done, infos

  def close(self):
    self._pool.close()

  def get_attr(self, attr_name, indices=None):
    return [None] * len(list(self._get_indices(indices)))

  def set_attr(self, attr_name, value, indices=None):
    raise NotImplementedError

  def env_method(self, method_name, *args, indices=None, **kwargs):
    raise NotImplementedError

  def env_is_wrapped(self, wrapper_class, indices=None):
    return [False] * len(list(self._get_indices(indices)))


class Progress(BaseCallback):
  """Notes each update: the next rollout begins when an update is over.

  With a replay, nothing is noted until the first gradient step, whose program is compiled then.
  """

  def __init__(self, records):
    """Keeps the records."""
    super().__init__()
    self._records = records

  def _on_rollout_start(self):
    if self.num_timesteps > getattr(self.model, 'learning_starts', 0):
      self._records.write(self.num_timesteps)

  def _on_step(self):
    return True


def make_envs(config, kind):
  """Returns the vector environment."""
  task = config['env']['task'].removeprefix('gymnasium:')
  num_envs = config['env']['num_envs']
  is_atari = task == 'Pong-v5'
  if kind == 'envpool':
    options = {name: config['env'][name] for name in ('episodic_life', 'reward_clip')
               } if is_atari else {}
    envs = EnvPoolVecEnv(task, num_envs, seed=1, **options)
  elif is_atari:
    import ale_py
    import gymnasium
    gymnasium.register_envs(ale_py)
    envs = VecFrameStack(make_atari_env('PongNoFrameskip-v4', num_envs, seed=1), 4)
  else:
    classes = dict(gymnasium=DummyVecEnv, subproc=SubprocVecEnv)
    envs = make_vec_env(task, num_envs, seed=1, vec_env_cls=classes[kind])
  if config['normalise']['obs']:
    envs = VecNormalize(envs, gamma=config['loss']['discount'])
  return envs, is_atari


def make_model(library, config, envs, policy):
  """Returns the algorithm."""
  module = importlib.import_module('sbx' if library == 'sbx' else 'stable_baselines3')
  loss = config['loss']
  options = dict(learning_rate=config['optimizer']['learning_rate'], gamma=loss['discount'],
                 seed=1, device='cpu')
  hidden = list(config['network']['hidden'])
  if replay := config.get('replay'):
    options |= dict(
        buffer_size=replay['capacity'], learning_starts=replay['min_size'],
        batch_size=replay['batch_size'], tau=loss['tau'],
        train_freq=(config['unroll_length'], 'step'), gradient_steps=replay['gradient_steps'],
        policy_kwargs=dict(net_arch=dict(pi=hidden, qf=hidden)))
    return getattr(module, loss['name'].upper())(policy, envs, **options)
  options |= dict(
      n_steps=config['unroll_length'],
      batch_size=config['env']['num_envs'] * config['unroll_length'] // config['num_minibatches'],
      n_epochs=config['num_epochs'], gae_lambda=loss['gae_lambda'], clip_range=loss['clip'],
      ent_coef=loss['entropy_coef'], vf_coef=loss['value_coef'],
      max_grad_norm=config['optimizer']['max_grad_norm'])
  if policy == 'MlpPolicy':
    options['policy_kwargs'] = dict(net_arch=dict(pi=hidden, vf=hidden))
  if library == 'sb3':  # SBX does not clip the value
    options['clip_range_vf'] = loss['clip'] if loss['clip_value'] else None
  return module.PPO(policy, envs, **options)


def main():
  """Trains until the process is ended."""
  config, records, (library, kind) = arguments()
  envs, is_atari = make_envs(config, kind)
  model = make_model(library, config, envs, 'CnnPolicy' if is_atari else 'MlpPolicy')
  model.learn(10**9, callback=Progress(records))


if __name__ == '__main__':
  main()
