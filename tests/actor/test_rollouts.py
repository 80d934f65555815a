"""Real rollouts, compared row by row with EnvPool's Python API and plain bookkeeping."""

import ctypes
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
from podracer_jit.envs import envpool_envs, frames
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.losses.algorithm import Acted, ForActors
from podracer_jit.losses.impala import IMPALA
from tests import processes
from tests.envs.test_envs import python_pool
from tests.made import Function, bound

SMALL = dict(img_height=42, img_width=42)


def linear(params, obs):
  """Returns logits and a value that depend on every pixel."""
  x = obs.reshape(obs.shape[0], -1).astype(jnp.float32) / 255
  return jnp.tanh(x @ params[:, 1:]) / 2, x @ params[:, 0]


class Actor:
  """A compiled rollout over real environments, and its state."""

  def __init__(self, task, seeds, unroll_length, apply=linear, keys=(3,), first_apart=False,
               **options):
    """Makes the environments and the first state.

    Args:
      task: EnvPool's name of the task.
      seeds: the seeds of the environments, a list for each shard.
      unroll_length: rows of a rollout.
      apply: function(params, obs) -> logits, value.
      keys: the seed of each shard's random key.
      first_apart: see `rollouts.make_rollout`.
      **options: options of the task.
    """
    spec = envpool_envs.make_spec(task, options)
    vector_envs = [envpool_envs.EnvPoolVectorEnv(task, options, shard_seeds, 1)
                   for shard_seeds in seeds]
    self.rollout_program = RolloutProgram(vector_envs)
    self.params = jax.random.normal(
        jax.random.key(0), (int(np.prod(spec.obs_shape)), 1 + spec.num_actions))
    algorithm = bound(IMPALA(), Function(apply, self.params), spec=spec)
    self.state = rollouts.initial_state(algorithm, vector_envs, [jax.random.key(k) for k in keys])
    rollout = rollouts.make_rollout(algorithm, vector_envs, unroll_length,
                                    first_apart=first_apart)

    def rollout_with_stacks(given, state):  # observations as EnvPool gave them
      state, shard_rollouts = rollout(given, state)
      return state, [r._replace(obs=frames.stacks(r.obs)) for r in shard_rollouts]
    self.program = self.rollout_program.load(
        rollout_with_stacks, (ForActors(self.params), self.state), (1,))

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.rollout_program.close()

  def roll(self):
    """Returns the next rollout of every shard."""
    self.state, shard_rollouts = self.program(ForActors(self.params), self.state)
    return shard_rollouts


def roll(*args, count, **kwargs):
  """Returns the first `count` rollouts of one shard, as NumPy."""
  with Actor(*args, **kwargs) as actor:
    return [jax.tree.map(np.asarray, actor.roll()[0]) for _ in range(count)]


def without_fault(rollout):
  """Returns a rollout without the numbers of its environments, which are not rows."""
  return rollout._replace(episodes=rollout.episodes._replace(fault=None))


def concatenate(rollout_list):
  """Returns one long rollout; each rollout must begin with the observation that ended the last."""
  for rollout, next_rollout in zip(rollout_list[:-1], rollout_list[1:], strict=True):
    assert_array_equal(rollout.obs[-1], next_rollout.obs[0])
  long = jax.tree.map(lambda *x: np.concatenate(x),
                      *(without_fault(rollout)._replace(obs=rollout.obs[:-1])
                        for rollout in rollout_list))
  return long._replace(obs=np.concatenate([long.obs, rollout_list[-1].obs[-1:]]))


# Rows.

CASES = {
    # task, environments, rows of a rollout, rollouts, options, kinds of rows that must occur
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


def kinds_of_rows(rollout, steps):
  """Returns the kinds of rows that occur in a rollout concatenated from rollouts of `steps`."""
  kinds = dict(
      terminated=rollout.terminated & rollout.episodes.ended,
      truncated=rollout.truncated,
      # an episode ended with the last row of a rollout: the next rollout begins with its reset
      across=~rollout.valid[steps::steps],
      life=rollout.terminated & ~rollout.episodes.ended,
      clipped=(rollout.reward == 1) & (rollout.episodes.episode_return >= 10))
  return {kind for kind, rows in kinds.items() if np.any(rows)}


class ExpectedRow:
  """Computes in plain Python what a rollout must store of one environment."""

  def __init__(self):
    self.over_before = False  # the episode, or the life, ended with the row before
    self.sum = np.float32(0)
    self.length = 0

  def step(self, reward, terminated, truncated, unclipped, lives):
    """Returns valid, ended, episode return and length of the row."""
    valid = not self.over_before
    if valid:
      self.sum += unclipped
      self.length += 1
    else:
      assert (reward, unclipped, terminated, truncated) == (0, 0, False, False)
    ended = valid and bool(truncated or (terminated and not lives))
    row = (valid, ended, self.sum, self.length)
    self.over_before = bool(terminated or truncated)
    if ended:
      self.sum = np.float32(0)
      self.length = 0
    return row


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_every_row_equals_the_one_of_the_python_api(case):
  task, num_envs, steps, count, options, kinds = case
  seeds = env_seeds(4, 0, 0, num_envs)
  rollout = concatenate(roll(task, [seeds], steps, count=count, **options))
  pool = python_pool(task, seeds, **options)
  obs, _ = pool.reset()
  expected_rows = [ExpectedRow() for _ in seeds]
  for t in range(steps * count):
    assert_array_equal(rollout.obs[t], obs)
    obs, reward, terminated, truncated, info = pool.step(rollout.action[t])
    assert_array_equal(rollout.reward[t], reward)
    assert_array_equal(rollout.terminated[t], terminated)
    assert_array_equal(rollout.truncated[t], truncated)
    lives = info.get('lives', np.zeros(num_envs))
    unclipped = info.get('reward', reward)
    rows = [row.step(*step) for row, *step in zip(
        expected_rows, reward, terminated, truncated, unclipped, lives, strict=True)]
    stored = (rollout.valid[t], *(x[t] for x in rollout.episodes[:3]))
    for actual, expected in zip(stored, zip(*rows, strict=True), strict=True):
      assert_array_equal(actual, expected)
    if not options.get('episodic_life'):  # then EnvPool's own count of steps marks resets, too
      assert_array_equal(rollout.valid[t], info['elapsed_step'] > 0)
  assert_array_equal(rollout.obs[-1], obs)
  pool.close()
  assert kinds_of_rows(rollout, steps) >= set(kinds.split())


def test_elapsed_step_misses_the_resets_after_lost_lives():
  """Rollouts therefore cannot compute `valid` from it."""
  pool = python_pool('Breakout-v5', [1, 2], episodic_life=True, **SMALL)
  pool.reset()
  missed = 0
  over = np.zeros(2, bool)
  for _ in range(100):
    _, _, terminated, truncated, info = pool.step(np.ones(2, np.int32))
    missed += np.sum(over & (info['elapsed_step'] > 0))
    over = terminated | truncated
  pool.close()
  assert missed


# Consecutive rollouts, random keys, and outputs of the policy.


def greedy(params, obs):
  """Returns logits so large that sampling always takes the best action."""
  logits, value = linear(params, obs)
  return logits * 1e6, value


@pytest.mark.quick
def test_two_rollouts_equal_one_of_twice_the_length():
  seeds = [env_seeds(1, 0, 0, 4)]
  short = concatenate(roll('CartPole-v1', seeds, 12, count=4, apply=greedy))
  long = concatenate(roll('CartPole-v1', seeds, 24, count=2, apply=greedy))
  jax.tree.map(assert_array_equal, short, long)
  assert short.episodes.ended.any()


def uniform(params, obs):
  del params
  return jnp.zeros((obs.shape[0], 2)), jnp.zeros(obs.shape[0])


def test_every_rollout_row_and_environment_draws_by_its_own_key():
  rollout_list = roll('CartPole-v1', [list(range(64))], 6, count=3, apply=uniform)
  key = jax.random.key(3)
  expected = [[jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, k), t),
                                      jnp.zeros((64, 2))) for t in range(6)] for k in range(3)]
  assert_array_equal([rollout.action for rollout in rollout_list], expected)
  assert len(np.unique(np.reshape(expected, (18, 64)), axis=0)) == 18


def test_log_prob_and_value_are_the_policys_at_the_observation():
  with Actor('Breakout-v5', [[1, 2, 3]], 16, **SMALL) as actor:
    rollout, = actor.roll()
    logits, value = linear(actor.params, rollout.obs[:-1].reshape(48, -1))
    action = rollout.action.reshape(48, 1)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action, axis=1)[:, 0]
    assert_allclose(rollout.extras['log_prob'].reshape(48), log_prob, rtol=1e-4, atol=1e-5)
    assert_allclose(rollout.extras['value'].reshape(48), value, rtol=1e-4, atol=1e-4)
    assert np.std(rollout.extras['log_prob']) > 0.01


class Counts(IMPALA):
  """Stores what it is given, and counts the rows of each episode in its carry."""

  def initial_carry(self, num_envs):
    return {'rows': jnp.zeros(num_envs, jnp.int32)}

  def act(self, params, obs, carry, valid, key, exploration):
    logits = self.network.apply(params, obs[None], None, valid[None])[0][0]
    policy = self.parts.policy
    action = policy.mode(logits) if key is None else policy.sample(key, logits)
    rows = carry['rows'] + 1
    extras = dict(valid=valid, obs=obs, rows=rows, exploration=exploration, logits=logits)
    return Acted(action, extras, {'rows': jnp.where(valid, rows, 0)}, logits)

  def exploration(self, num_envs):
    return np.arange(num_envs, dtype=np.float32)


@pytest.mark.parametrize('greedily', [False, True])
def test_what_an_algorithm_adds_is_stored_and_its_carry_passed_on(greedily):
  """Two shards have environments 4 and 5, and 6 to 8, of the nine of the run."""
  envs = [[4, 5], [6, 7, 8]]
  vector_envs = [envpool_envs.EnvPoolVectorEnv('CartPole-v1', {'max_episode_steps': 9}, seeds, 1)
                 for seeds in envs]
  program = RolloutProgram(vector_envs)
  params = jax.random.normal(jax.random.key(0), (4, 3))
  algorithm = bound(Counts(), Function(linear, params))
  state = rollouts.initial_state(algorithm, vector_envs, list(jax.random.split(jax.random.key(1))),
                                 4, algorithm.exploration(9))
  function = rollouts.make_rollout(algorithm, vector_envs, 7, greedy=greedily)
  roll_once = program.load(function, (ForActors(params), state), (1,))
  turns = []
  for _ in range(4):
    state, shard_rollouts = roll_once(ForActors(params), state)
    turns.append(jax.tree.map(np.asarray, shard_rollouts))
  program.close()

  for i, shard in enumerate(zip(*turns, strict=True)):
    before = np.zeros(len(envs[i]), np.int32)
    for rollout in shard:
      assert_array_equal(rollout.carry['rows'], before[None])
      for t, valid in enumerate(rollout.valid):
        assert_array_equal(rollout.extras['rows'][t], before + 1)
        before = np.where(valid, before + 1, 0)
      assert_array_equal(rollout.extras['valid'], rollout.valid)
      assert_array_equal(rollout.extras['obs'], rollout.obs[:-1])
      assert_array_equal(rollout.extras['exploration'], np.tile(np.float32(envs[i]), (7, 1)))
      assert [rollout.extras[name].dtype for name in ('rows', 'valid')] == [np.int32, bool]
    best = [(r.action == r.extras['logits'].argmax(axis=-1)).all() for r in shard]
    assert all(best) == greedily
    assert not np.all([rollout.valid for rollout in shard])


def test_shards_of_one_program_do_not_affect_each_other():
  seeds = [[1, 2, 3], [4, 5, 6, 7, 8]]
  keys = [8, 9]
  options = dict(max_episode_steps=12, **SMALL)
  with Actor('Breakout-v5', seeds, 10, keys=keys, **options) as actor:
    together = [actor.roll() for _ in range(3)]
  for i in range(2):
    alone = roll('Breakout-v5', [seeds[i]], 10, keys=[keys[i]], count=3, **options)
    jax.tree.map(assert_array_equal,
                 [without_fault(shard_rollouts[i]) for shard_rollouts in together],
                 [without_fault(rollout) for rollout in alone])
    first = together[0][i].episodes.fault[0, :, 4]
    assert_array_equal(first, np.arange(len(seeds[i])) + 3 * i)


@pytest.mark.parametrize('steps', [1, 6])
@pytest.mark.parametrize('task', ['CartPole-v1', 'Breakout-v5'])
def test_a_first_turn_apart_changes_no_rollout(task, steps):
  """The first turn of a rollout, which receives nothing, is not in the loop on GPUs."""
  options = dict(max_episode_steps=7, **(SMALL if task == 'Breakout-v5' else {}))
  rolled = [roll(task, [[1, 2], [3, 4]], steps, keys=[8, 9], count=3, first_apart=apart, **options)
            for apart in (False, True)]
  jax.tree.map(assert_array_equal, *rolled)


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
      assert compiled  # the listener works
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)


# The interpreter lock (GIL).


class Pulse:
  """A Python thread that records when it ran."""

  def __init__(self, beat=lambda: time.sleep(1e-3)):
    self.beats = [time.monotonic()]
    self._beat = beat
    self._stop = threading.Event()
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
  """Sleeps without releasing the interpreter lock: calls through PyDLL keep it."""
  ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_dispatched_rollout_finishes_while_python_stands_still():
  """Holds the lock for longer and longer, since a second may be too short on a busy machine."""
  with Actor('CartPole-v1', [list(range(64))], 3000) as actor:
    jax.block_until_ready(actor.roll())
    for seconds in (1, 4, 16, 64):
      with Pulse() as pulse:
        obs = actor.roll()[0].obs
        ready_before = obs.is_ready()
        hold_the_interpreter(seconds)
        ready_after = obs.is_ready()
      assert pulse.longest_silence() >= seconds  # nothing in Python ran
      jax.block_until_ready(obs)
      if ready_after and not ready_before:
        return
    pytest.fail('the rollout waited for the interpreter')


def test_an_actor_that_steps_in_python_stands_still_while_the_lock_is_held():
  """Checks the test above: it notices an actor that needs the interpreter."""
  pool = python_pool('CartPole-v1', list(range(64)))
  pool.reset()
  with Pulse(lambda: pool.step(np.zeros(64, np.int32))) as actor:
    time.sleep(0.05)
    hold_the_interpreter(0.5)
    assert actor.longest_silence() >= 0.5
  pool.close()
  assert len(actor.beats) > 2


# A RolloutProgram ends in a safe order, whatever happens.

POOLS = """
import contextlib, faulthandler, threading
import jax
from podracer_jit.losses.algorithm import ForActors
from tests.actor.test_rollouts import Actor

def make(steps=2000):  # long enough to be in flight for a while
  return Actor('CartPole-v1', [[1, 2, 3, 4]], steps)

faulthandler.enable()
for _ in range(3):  # closed while a call is in flight, and once more
  actor = make()
  actor.roll()
  actor.roll()
  actor.rollout_program.close()
  actor.rollout_program.close()

for _ in range(3):  # called by a thread, closed by the main thread right after the call
  actor, called = make(), threading.Event()
  thread = threading.Thread(target=lambda: (actor.roll(), called.set()))
  thread.start()
  called.wait()
  actor.rollout_program.close()
  thread.join()

for _ in range(3):  # an exception in between
  with contextlib.suppress(ZeroDivisionError), make() as actor:
    actor.roll()
    1 / 0

actor = make(3)  # a call that fails, and a call after the end, raise an exception and do no harm
for state in (actor.state._replace(envs=()), None):
  with contextlib.suppress(TypeError, ValueError):
    actor.program(ForActors(actor.params), state)
    raise SystemExit('a wrong state was accepted')
actor.roll()
actor.rollout_program.close()
with contextlib.suppress(Exception):
  actor.roll()
  raise SystemExit('a closed program was called')

actor = make(3)  # closed before its first call
actor.rollout_program.close()

with make(10) as first, make(10) as second:  # side by side; their rollouts outlive them
  rollouts = first.roll(), second.roll()
assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, rollouts)))
print('alive')
"""


@pytest.mark.full
def test_closing_failing_and_rebuilding_programs_never_crash_the_process():
  done = processes.run([sys.executable, '-c', POOLS], timeout=600)
  assert (done.returncode, done.stdout.split()) == (0, ['alive']), done.stderr[-4000:]
