"""Real rollouts, compared step for step with EnvPool's Python API and plain bookkeeping."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.actor import rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents import policies
from podracer_jit.envs import envpool_envs, frames
from podracer_jit.envs.seeds import env_seeds
from tests.envs.test_envs import python_pool
from tests.runs import by_rows

SMALL = dict(img_height=42, img_width=42)


def linear(params, obs):
  """Logits and a value that depend on every pixel."""
  x = obs.reshape(obs.shape[0], -1).astype(jnp.float32) / 255
  return jnp.tanh(x @ params[:, 1:]) / 2, x @ params[:, 0]


class Actor:
  """A compiled rollout over real shards and its state."""

  def __init__(self, task, seeds, unroll_length, apply=linear, keys=(3,), **options):
    """A list of `seeds` and a number for its key a shard."""
    spec = envpool_envs.make_spec(task, options)
    vector_envs = [envpool_envs.EnvPoolVectorEnv(task, options, some, 1) for some in seeds]
    self.pools = RolloutProgram(vector_envs)
    self.params = jax.random.normal(
        jax.random.key(0), (int(np.prod(spec.obs_shape)), 1 + spec.num_actions))
    self.state = rollouts.initial_state(vector_envs, [jax.random.key(k) for k in keys])
    policy = policies.categorical(spec.num_actions)
    rollout = rollouts.make_rollout(vector_envs, by_rows(apply), policy, unroll_length, spec.stack)

    def whole(params, state):  # with observations as EnvPool gave them
      state, made = rollout(params, state)
      return state, [m._replace(obs=frames.stacks(m.obs)) for m in made]
    self.program = self.pools.load(whole, (self.params, self.state), (1,))

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.pools.close()

  def roll(self):
    """The next rollout of every shard."""
    self.state, made = self.program(self.params, self.state)
    return made


def roll(*args, count, **kwargs):
  """`count` rollouts in a row of one shard, as NumPy."""
  with Actor(*args, **kwargs) as actor:
    return [jax.tree.map(np.asarray, actor.roll()[0]) for _ in range(count)]


def in_a_row(made):
  """Rollouts one after the other; each begins with the frame that ended the one before."""
  for one, next_one in zip(made[:-1], made[1:], strict=True):
    assert_array_equal(one.obs[-1], next_one.obs[0])
  def rows(*x):
    return np.concatenate(x)
  whole = jax.tree.map(rows, *(m._replace(obs=m.obs[:-1]) for m in made))
  return whole._replace(obs=np.concatenate([whole.obs, made[-1].obs[-1:]]))


# Rows.

CASES = {
    # task, environments, rows of a rollout, rollouts, options, what is to be met
    'terminations': ('CartPole-v1', 5, 7, 20, {}, 'terminated across'),
    'both ends': ('CartPole-v1', 5, 7, 20, dict(max_episode_steps=15),
                  'terminated truncated across'),
    'every row an end': ('CartPole-v1', 2, 3, 4, dict(max_episode_steps=1), 'truncated across'),
    'no lives': ('Catch-v0', 3, 9, 4, {}, 'terminated across'),
    'frames': ('Breakout-v5', 4, 16, 20, dict(max_episode_steps=176, **SMALL),
               'terminated truncated across'),
    'lost lives': ('Breakout-v5', 4, 16, 20,
                   dict(max_episode_steps=144, episodic_life=True, repeat_action_probability=0.25,
                        **SMALL), 'terminated truncated across life'),
    'colour': ('Breakout-v5', 4, 16, 20,
               dict(max_episode_steps=144, episodic_life=True, use_fire_reset=True,
                    gray_scale=False, stack_num=3, **SMALL), 'terminated truncated across life'),
    'clipped rewards': ('MsPacman-v5', 3, 16, 14,
                        dict(max_episode_steps=96, reward_clip=True, **SMALL),
                        'truncated across clipped'),
}


def met(made, steps):
  """The kinds of rows that a test should have seen."""
  kinds = dict(
      terminated=made.terminated & made.episodes.ended,
      truncated=made.truncated,
      across=~made.valid[steps::steps],  # the first row of a rollout is the reset after the last's
      life=made.terminated & ~made.episodes.ended,
      clipped=(made.reward == 1) & (made.episodes.episode_return >= 10))
  return {kind for kind, rows in kinds.items() if np.any(rows)}


class Row:
  """What one environment's row should hold, kept in plain Python."""

  def __init__(self):
    self.over_before = False  # the episode, or the life, ended with the row before
    self.sum, self.length = np.float32(0), 0

  def step(self, reward, terminated, truncated, unclipped, lives):
    """Returns valid, ended, episode return and length of the row."""
    valid = not self.over_before
    if valid:
      self.sum, self.length = self.sum + unclipped, self.length + 1
    else:
      assert (reward, unclipped, terminated, truncated) == (0, 0, False, False)
    ended = valid and bool(truncated or (terminated and not lives))
    row = (valid, ended, self.sum, self.length)
    self.over_before = bool(terminated or truncated)
    if ended:
      self.sum, self.length = np.float32(0), 0
    return row


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_every_row_is_what_the_python_api_gives(case):
  task, num_envs, steps, count, options, kinds = case
  seeds = env_seeds(4, 0, 0, num_envs)
  made = in_a_row(roll(task, [seeds], steps, count=count, **options))
  pool = python_pool(task, seeds, **options)
  obs, _ = pool.reset()
  books = [Row() for _ in seeds]
  for t in range(steps * count):
    assert_array_equal(made.obs[t], obs)
    obs, reward, terminated, truncated, info = pool.step(made.action[t])
    assert_array_equal(made.reward[t], reward)
    assert_array_equal(made.terminated[t], terminated)
    assert_array_equal(made.truncated[t], truncated)
    lives, unclipped = info.get('lives', np.zeros(num_envs)), info.get('reward', reward)
    rows = [book.step(*row) for book, *row in zip(
        books, reward, terminated, truncated, unclipped, lives, strict=True)]
    expected = (made.valid[t], *(x[t] for x in made.episodes))
    for actual, wanted in zip(expected, zip(*rows, strict=True), strict=True):
      assert_array_equal(actual, wanted)
    if not options.get('episodic_life'):  # EnvPool's own count tells resets apart as well
      assert_array_equal(made.valid[t], info['elapsed_step'] > 0)
  assert_array_equal(made.obs[-1], obs)
  pool.close()
  assert met(made, steps) >= set(kinds.split())


def test_elapsed_step_misses_the_resets_after_lost_lives():
  """Why `valid` does not come from it."""
  pool = python_pool('Breakout-v5', [1, 2], episodic_life=True, **SMALL)
  pool.reset()
  missed, over = 0, np.zeros(2, bool)
  for _ in range(100):
    _, _, terminated, truncated, info = pool.step(np.ones(2, np.int32))
    missed += np.sum(over & (info['elapsed_step'] > 0))
    over = terminated | truncated
  pool.close()
  assert missed


# Going on, keys and what the policy thought.


def decided(params, obs):
  """A policy that leaves nothing to chance."""
  logits, value = linear(params, obs)
  return logits * 1e6, value


@pytest.mark.quick
def test_two_rollouts_are_one_twice_as_long():
  seeds = [env_seeds(1, 0, 0, 4)]
  short = in_a_row(roll('CartPole-v1', seeds, 12, count=4, apply=decided))
  long = in_a_row(roll('CartPole-v1', seeds, 24, count=2, apply=decided))
  jax.tree.map(assert_array_equal, short, long)
  assert short.episodes.ended.any()


def uniform(params, obs):
  del params
  return jnp.zeros((obs.shape[0], 2)), jnp.zeros(obs.shape[0])


def test_every_rollout_row_and_environment_draws_by_its_own_key():
  made = roll('CartPole-v1', [list(range(64))], 6, count=3, apply=uniform)
  key = jax.random.key(3)
  drawn = [[jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, k), t),
                                   jnp.zeros((64, 2))) for t in range(6)] for k in range(3)]
  assert_array_equal([m.action for m in made], drawn)
  assert len(np.unique(np.reshape(drawn, (18, 64)), axis=0)) == 18


def test_log_prob_and_value_are_those_of_the_policy_at_the_observation():
  with Actor('Breakout-v5', [[1, 2, 3]], 16, **SMALL) as actor:
    made, = actor.roll()
    logits, value = linear(actor.params, made.obs[:-1].reshape(48, -1))
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), made.action.reshape(48, 1), axis=1)
    assert_allclose(made.behaviour_log_prob.reshape(48), log_prob[:, 0], rtol=1e-4, atol=1e-5)
    assert_allclose(made.behaviour_value.reshape(48), value, rtol=1e-4, atol=1e-4)
    assert np.std(made.behaviour_log_prob) > 0.01


def test_interleaved_shards_are_what_each_is_alone():
  seeds, keys = [[1, 2, 3], [4, 5, 6, 7, 8]], [8, 9]
  options = dict(max_episode_steps=12, **SMALL)
  with Actor('Breakout-v5', seeds, 10, keys=keys, **options) as both:
    together = [both.roll() for _ in range(3)]
  for i in range(2):
    alone = roll('Breakout-v5', [seeds[i]], 10, keys=[keys[i]], count=3, **options)
    jax.tree.map(assert_array_equal, [made[i] for made in together], alone)


def test_a_second_call_compiles_nothing():
  compiled = []
  def listen(event, seconds, **kwargs):
    del seconds, kwargs
    if 'backend_compile' in event:
      compiled.append(event)

  with Actor('CartPole-v1', [[1, 2], [3, 4]], 4, keys=[8, 9]) as actor:
    actor.roll()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
      for _ in range(3):
        jax.block_until_ready(actor.roll())
      assert not compiled
      jax.jit(lambda x: x * 123.5)(1.0)
      assert compiled  # the listener would have heard
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)


# No GIL.


class Pulse:
  """A Python thread that notes when it was last alive."""

  def __init__(self, beat=lambda: time.sleep(1e-3)):
    self.beats, self._beat, self._stop = [time.monotonic()], beat, threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *error):
    self._stop.set()
    self._thread.join()

  def _run(self):
    while not self._stop.is_set():
      self._beat()
      self.beats.append(time.monotonic())

  def longest_silence(self):
    return np.max(np.diff([*self.beats, time.monotonic()]))


def hold_the_interpreter(seconds):
  """Sleeps without giving up the interpreter lock, as PyDLL does not."""
  ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_dispatched_rollout_finishes_while_python_stands_still():
  """The lock is held for longer if the machine was too busy for a second to be enough."""
  with Actor('CartPole-v1', [list(range(64))], 3000) as actor:
    jax.block_until_ready(actor.roll())
    for seconds in (1, 4, 16, 64):
      with Pulse() as pulse:
        made = actor.roll()[0].obs
        before = made.is_ready()
        hold_the_interpreter(seconds)
        after = made.is_ready()
      assert pulse.longest_silence() >= seconds  # nothing in Python ran
      jax.block_until_ready(made)
      if after and not before:
        return
    pytest.fail('the rollout waited for the interpreter')


def test_an_actor_that_steps_in_python_stands_still_meanwhile():
  """What the rollout's test would see if it did need the interpreter."""
  pool = python_pool('CartPole-v1', list(range(64)))
  pool.reset()
  with Pulse(lambda: pool.step(np.zeros(64, np.int32))) as actor:
    time.sleep(0.05)
    hold_the_interpreter(0.5)
    assert actor.longest_silence() >= 0.5
  pool.close()
  assert len(actor.beats) > 2


# RolloutProgram end in an order that is safe, whatever happens.

POOLS = """
import contextlib, threading
import jax
from tests.actor.test_rollouts import Actor

def make(steps=2000):  # long enough to be in flight for a while
  return Actor('CartPole-v1', [[1, 2, 3, 4]], steps)

for _ in range(3):  # closed while a call is in flight, and once more
  actor = make()
  actor.roll()
  actor.roll()
  actor.pools.close()
  actor.pools.close()

for _ in range(3):  # called by a thread, closed by this one as soon as it has called
  actor, called = make(), threading.Event()
  thread = threading.Thread(target=lambda: (actor.roll(), called.set()))
  thread.start()
  called.wait()
  actor.pools.close()
  thread.join()

for _ in range(3):  # an exception in between
  with contextlib.suppress(ZeroDivisionError), make() as actor:
    actor.roll()
    1 / 0

actor = make(3)  # a call that fails, and one after the end: exceptions, no more
for state in (actor.state._replace(envs=()), None):
  with contextlib.suppress(TypeError, ValueError):
    actor.program(actor.params, state)
    raise SystemExit('a wrong state was taken')
actor.roll()
actor.pools.close()
with contextlib.suppress(Exception):
  actor.roll()
  raise SystemExit('a closed program was called')

actor = make(3)  # closed before its first call
actor.pools.close()

with make(10) as one, make(10) as other:  # side by side, and what came out outlives them
  made = one.roll(), other.roll()
assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, made)))
print('alive')
"""


def test_closing_failing_and_rebuilding_pools_never_ends_the_process():
  env = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
  done = subprocess.run([sys.executable, '-X', 'faulthandler', '-c', POOLS], env=env, text=True,
                        capture_output=True, timeout=600)
  assert (done.returncode, done.stdout.split()) == (0, ['alive']), done.stderr[-4000:]
