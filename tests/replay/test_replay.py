"""Replays against naive NumPy that keeps everything for ever, on made-up and on real experience."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

from podracer_jit.actor import priorities, rollouts
from podracer_jit.actor.rollout_program import RolloutProgram
from podracer_jit.agents import policies
from podracer_jit.envs import envpool_envs, frames
from podracer_jit.envs.seeds import env_seeds
from podracer_jit.replay import buffer, tree
from podracer_jit.types import Experience, Rollout
from tests.actor.test_rollouts import in_a_row
from tests.reference import random_ends
from tests.runs import by_rows

N, GAMMA, LEAST = 3, 0.9, 1e-6
put, find = jax.jit(tree.put), jax.jit(tree.find)

# The tree.


@pytest.mark.parametrize('size', [1, 5, 16, 17, 300, 5000])
def test_every_node_is_the_sum_of_its_leaves(size):
  rng = np.random.default_rng(size)
  made, leaves = tree.init(3, size), np.zeros((3, size))
  for group in ([0, 2], [2, 1], [3, 0], [7, 9]) * 3:  # some are not there
    named = np.stack([rng.permutation(size)[:80] for _ in group])
    value = np.float32((rng.random(named.shape) < 0.8) * 10 ** rng.uniform(-4, 4, named.shape))
    nowhere = rng.random(named.shape) < 0.1
    made = put(made, jnp.array(group), np.where(nowhere, tree.NOWHERE, named), value)
    for i, g in enumerate(group):
      if g < 3:
        leaves[g, named[i][~nowhere[i]]] = value[i][~nowhere[i]]
  assert leaves.any(axis=1).all()
  assert_allclose(tree.total(made), leaves.sum(axis=1), rtol=1e-6)
  assert_array_equal(tree.get(made, jnp.array([2, 3]), np.tile(np.arange(size), (2, 1))),
                     [leaves[2], np.zeros(size)])
  for height, level in enumerate(made):
    width = 16**height
    padded = np.zeros((3, level.shape[1] * width))
    padded[:, :size] = leaves
    assert_allclose(level, padded.reshape(3, -1, width).sum(axis=2), rtol=1e-6)
  assert made[-1].shape == (3, 1)


@pytest.mark.parametrize('size', [1, 5, 17, 5000])
def test_the_leaf_found_is_the_one_that_holds_the_mass(size):
  rng = np.random.default_rng(size)
  where = np.tile(np.arange(size), (3, 1))
  leaves = rng.integers(0, 9, (3, size)) * (rng.random((3, size)) < 0.6)
  leaves[:, size // 2] += 1
  # Whole numbers: no sum is rounded, so borders are exact too.
  made = put(tree.init(3, size), jnp.arange(3), where, np.float32(leaves))
  ends = np.cumsum(leaves, axis=1)
  mass = np.floor(rng.random((3, 2000)) * 2 * ends[:, -1:]) / 2
  expected = [np.searchsorted(end, m, side='right') for end, m in zip(ends, mass, strict=True)]
  assert_array_equal(find(made, jnp.float32(mass)), expected)
  # Of any numbers, except within rounding; none that is zero, not even by rounding.
  leaves = np.float32((leaves > 0) * 10 ** rng.uniform(-3, 3, (3, size)))
  made = put(made, jnp.arange(3), where, leaves)
  ends, whole = np.cumsum(leaves, axis=1, dtype=np.float64), np.asarray(tree.total(made))[:, None]
  mass = np.float32(rng.random((3, 2000)) * whole)
  mass[:, :6] = whole * np.float32([0, 1e-30, 1 - 1e-7, 1, 1 + 1e-6, 2])
  found = np.asarray(find(made, mass))
  for g in range(3):
    assert (leaves[g][found[g]] > 0).all()
    for shift in (-2e-6, 2e-6):
      bound = np.searchsorted(ends[g], mass[g] + shift * whole[g], side='right')
      last = np.flatnonzero(leaves[g])[-1]
      assert ((found[g] - np.minimum(bound, last)) * np.sign(shift) <= 0).all()


def test_a_million_changes_leave_the_tree_that_is_built_at_once():
  @jax.jit
  def change(made):
    def once(i, made):
      first, by, size = jax.random.split(jax.random.fold_in(jax.random.key(0), i), 3)
      leaf = (jax.random.randint(first, (2, 1), 0, 701) + jnp.arange(128) * jax.random.randint(
          by, (2, 1), 1, 701)) % 701  # which is prime: all are others
      value = 10 ** jax.random.uniform(size, (2, 128), minval=-4.0, maxval=4.0)
      return tree.put(made, jnp.arange(2), leaf, value)
    return jax.lax.fori_loop(0, 4000, once, made)
  made = change(tree.init(2, 701))
  leaves = np.asarray(made[0])
  whole = put(tree.init(2, 701), jnp.arange(2), np.tile(np.arange(701), (2, 1)), leaves[:, :701])
  jax.tree.map(assert_array_equal, made, whole)
  assert (leaves[:, :701] > 0).all()
  assert_allclose(tree.total(made), leaves.sum(axis=1, dtype=np.float64), rtol=1e-5)


# Made-up experience, every observation of which is a number of its own.


@functools.cache
def memory(eviction, capacity, num_envs, steps, stack=1, exponent=0.6, n_step=N):
  made = buffer.Replay(capacity, num_envs, steps, stack, n_step, GAMMA, eviction, exponent, -0.4)
  return types.SimpleNamespace(
      init=made.init, add=jax.jit(made.add), sample=jax.jit(made.sample, static_argnums=2),
      set_priorities=jax.jit(made.set_priorities))


def story(rng, steps, num_envs, first):
  """(rows, the TD error of what begins in each); observations are numbered from `first` on."""
  ends = [random_ends(rng, steps, probability=0.15) for _ in range(num_envs)]
  obs = np.float32(first + np.arange((steps + 1) * num_envs)).reshape(steps + 1, num_envs, 1)
  size = steps, num_envs
  return Rollout(obs, rng.integers(0, 9, size, np.int32), (), (), np.float32(rng.normal(size=size)),
                 *(np.stack(x, axis=1) for x in zip(*ends, strict=True)),
                 ()), np.float32(10 ** rng.uniform(-1.5, 1.5, size))


def cut(rows, error, steps, n_step=N):
  """The same as Experience of so many steps each."""
  def late(x):
    return np.concatenate([np.zeros_like(x[:n_step]), x])[:len(x)]
  late_error, starts = late(error), late(rows.valid)
  for i in range(0, len(error), steps):
    now = slice(i, i + steps)
    frame = rows.obs[i:i + steps + 1]
    yield Experience(
        frame, np.zeros(frame.shape[:2], bool), np.full((1, error.shape[1]), i == 0),
        *(x[now] for x in (rows.action, rows.reward, rows.terminated, rows.truncated, rows.valid,
                           late_error, starts)), ())


def together(*parts):
  return jax.tree.map(lambda *x: np.stack(x), *(p._replace(episodes=()) for p in parts))


def walk(rows, t, e, n_step=N):
  """obs, action, return, discount, next_obs and its row, of what begins there, step by step."""
  total, gamma = 0.0, 1.0
  for i in range(t, t + n_step):
    total, gamma = total + gamma * float(rows.reward[i, e]), gamma * GAMMA
    if rows.terminated[i, e]:
      gamma = 0.0
    if rows.terminated[i, e] or rows.truncated[i, e]:
      break
  return rows.obs[t, e], rows.action[t, e], total, gamma, rows.obs[i + 1, e], i + 1


def told(rows, error, at=0):
  """{number of obs: (walk, TD error, row, of those from `at` on)} of what is complete."""
  return {int(rows.obs[t, e, 0]): (walk(rows, t, e), float(error[t, e]), at + t)
          for t, e in np.argwhere(rows.valid[:-N])}


def keys(seed, groups=2):
  return jax.random.split(jax.random.key(seed), groups)


STEPS, ENVS, CAPACITY = 8, 4, 96


@functools.cache
def filled(eviction, exponent=0.6):
  """A replay of two groups with room for all it was given: (it, its state, what was told)."""
  made, rng = memory(eviction, CAPACITY, ENVS, STEPS, exponent=exponent), np.random.default_rng(0)
  stories = [story(rng, 3 * STEPS, ENVS, first) for first in (0, 5000)]
  parts = [list(cut(*one, STEPS)) for one in stories]
  state = made.init(2, parts[0][0])
  for i, new in enumerate(zip(*parts, strict=True)):
    state = made.add(state, jnp.arange(2), together(*new), keys(i), jnp.int32(i))
  known = [told(*one) for one in stories]
  assert_array_equal(state.size, [len(k) for k in known])
  return made, state, known


def chi_square(counts, masses):
  """How improbable so large a statistic is, were the counts drawn independently by the masses."""
  masses = np.asarray(masses, np.float64)
  return scipy.stats.chisquare(counts, np.sum(counts) * masses / np.sum(masses)).pvalue


# Sampling. One leaf of a draw comes from each of `count` equal parts of the sum: counts vary less
# than those of independent draws, which only makes a chi-square statistic smaller.


@pytest.mark.parametrize('eviction, exponent', [('fifo', 0.6), ('prioritised', 0.6), ('fifo', 0)])
def test_draws_are_in_proportion_to_the_power_of_the_td_error(eviction, exponent):
  (made, state, known), rng = filled(eviction, exponent), np.random.default_rng(4)
  seen = made.sample(state, keys(5), 64)  # of these priorities are set, others are as they came
  news = np.float32([rng.uniform(0.1, 5, 64), rng.uniform(0.1, 5, 64)])
  state = made.set_priorities(state, seen.place, news)
  drawn = jax.jit(jax.vmap(lambda keys: made.sample(state, keys, 64)))(
      jax.random.split(jax.random.key(1), (4000, 2)))
  number, probability = (np.asarray(x).swapaxes(0, 1).reshape(2, -1) for x in (
      drawn.transition.obs, drawn.probability))
  for g in range(2):
    numbers, error = np.array([[k, error] for k, (_, error, _) in known[g].items()]).T
    twice = np.searchsorted(numbers, seen.transition.obs[g, :, 0])
    assert len(set(twice)) < min(64, len(numbers))
    error[twice[::-1]] = news[g, ::-1]  # NumPy keeps the last, so the first
    error += LEAST
    which = np.searchsorted(numbers, number[g])
    assert_array_equal(numbers[which], number[g])  # nothing else was drawn
    mass = error**exponent
    assert_allclose(probability[g], (mass / np.sum(mass))[which], rtol=1e-5)
    counts = np.bincount(which, minlength=len(numbers))
    assert chi_square(counts, mass) > 1e-3
    assert max(chi_square(counts, mass * error**wrong) for wrong in (-0.1, 0.1)) < 1e-12


@pytest.mark.quick
def test_a_draw_takes_one_from_each_part_of_the_sum():
  made, state, _ = filled('fifo')
  place = np.asarray(made.sample(state, keys(3), 64).place)
  for g in range(2):
    ends = np.cumsum(np.asarray(state.priorities[0][g], np.float64))
    ends /= ends[-1]
    begins = np.concatenate([[0], ends[:-1]])
    part = np.arange(64)
    assert (np.diff(place[g]) >= 0).all() and (ends[place[g]] > part / 64 - 1e-5).all()
    assert (begins[place[g]] < (part + 1) / 64 + 1e-5).all()


def test_small_leaves_of_a_large_tree_are_told_apart():
  """Their borders are whole numbers above 2^24, of which float32 has every other one."""
  leaves = np.float32(np.concatenate([
      np.random.default_rng(0).integers(3000, 9000, 4096), np.ones(4 * 4096)]))
  made = put(tree.init(1, len(leaves)), jnp.arange(1), np.arange(len(leaves))[None], leaves[None])
  assert 2**24 < tree.total(made)[0] < 2**25
  leaf, probability = jax.tree.map(np.asarray, jax.jit(jax.vmap(
      lambda key: tree.draw(made, key[None], 64)))(keys(0, 8000)))
  assert (np.diff(leaf[:, 0]) >= 0).all()
  assert_allclose(probability, leaves[leaf] / leaves.sum(dtype=np.float64), rtol=1e-6)
  counts = np.bincount(leaf.reshape(-1), minlength=len(leaves))
  small = counts[4096:]
  assert chi_square([*counts[:4096], small.sum()], [*leaves[:4096], 4 * 4096]) > 1e-3
  assert small.sum() > 100 and chi_square([small[::2].sum(), small[1::2].sum()], [1, 1]) > 1e-3
  assert chi_square(small.reshape(4, 8, 512).sum(axis=(0, 2)), np.ones(8)) > 1e-3  # in their nodes
  assert chi_square(counts[:4096], np.ones(4096)) < 1e-12


# Groups.


@pytest.mark.parametrize('eviction', ['fifo', 'prioritised'])
def test_groups_at_once_are_each_alone_and_others_stay(eviction):
  made, state, _ = filled(eviction)
  alone, rng = state, np.random.default_rng(1)
  parts = [list(cut(*story(rng, 10 * STEPS, ENVS, first), STEPS)) for first in (10000, 15000)]
  def add(state, group, i, new):
    return made.add(state, jnp.array(group), together(*new), keys(i), jnp.int32(i))
  for i, new in enumerate(zip(*parts, strict=True)):
    state = add(state, [1, 0], i, new)
    before, alone = alone, add(alone, [2, 0], i, new)  # there is no group 2
    jax.tree.map(lambda a, b: assert_array_equal(a[1], b[1]), before, alone)
    before, alone = alone, add(alone, [1, 2], i, new)
    jax.tree.map(lambda a, b: assert_array_equal(a[0], b[0]), before, alone)
  jax.tree.map(assert_array_equal, state, alone)
  assert (np.asarray(state.inserted) > 2 * CAPACITY).all()


# Slots.


def consistent(state, g, known, errors, capacity):
  """The numbers of the observations that a group's slots hold, all else checked."""
  there = np.asarray(state.slots.eviction[0][g, :state.slots.free.shape[1]]) > 0
  room = int(state.slots.room[g])
  free = np.asarray(state.slots.free[g, :room])
  assert sorted([*free, *np.flatnonzero(there)]) == list(range(len(there)))
  assert int(state.size[g]) == there.sum() <= capacity
  held = jax.tree.map(lambda x: np.asarray(x[g])[there], state.slots.transitions)
  numbers = held.obs[:, 0].astype(int)
  expected = [known[k] for k in numbers]
  assert_array_equal(held.action, [walked[1] for walked, *_ in expected])
  assert_allclose(held.reward, [walked[2] for walked, *_ in expected], atol=1e-6)
  assert_allclose(held.discount, [walked[3] for walked, *_ in expected], rtol=1e-6)
  assert_array_equal(held.next_obs, [walked[4] for walked, *_ in expected])
  assert_array_equal(held.added, [row // 4 for *_, row in expected])
  error = np.array([errors[k] for k in numbers], np.float64) + LEAST
  for levels, exponent in ((state.priorities, 0.6), (state.slots.eviction, -0.4)):
    assert_allclose(np.asarray(levels[0][g, :len(there)])[there], error**exponent, rtol=1e-5)
    assert not np.asarray(levels[0][g, :len(there)])[~there].any()
  assert len(set(numbers)) == len(numbers)
  return set(numbers)


def test_two_hundred_adds_and_evictions_lose_nothing_and_mix_nothing_up():
  capacity, rng = 50, np.random.default_rng(2)
  made = memory('prioritised', capacity, 2, 4)
  stories = [[story(rng, 400, 2, first + g) for first in (0, 1000)] for g in (0, 5000)]
  parts = [[*cut(*one, 4), *cut(*two, 4)] for one, two in stories]  # it began again in between
  known = [told(*one) | told(*two, at=400) for one, two in stories]
  errors = [{k: error for k, (_, error, _) in of.items()} for of in known]
  state, held, ever = made.init(2, parts[0][0]), [set(), set()], [set(), set()]
  for i, new in enumerate(zip(*parts, strict=True)):
    state = made.add(state, jnp.array([1, 0]), together(*new[::-1]), keys(i), jnp.int32(i))
    for g in range(2):
      came = {k for k, (*_, row) in known[g].items() if 4 * i <= row + N < 4 * i + 4}
      before, ever[g] = held[g] | came, ever[g] | came
      held[g] = consistent(state, g, known[g], errors[g], capacity)
      assert held[g] <= before and len(held[g]) == min(capacity, len(before))
    if i % 10 == 9:
      seen = made.sample(state, keys(1000 + i), 16)
      error = np.float32([0.1 * np.arange(16)] * 2)
      state = made.set_priorities(state, seen.place, error)
      for g in range(2):  # of one drawn twice the first
        numbers = np.asarray(seen.transition.obs[g, ::-1, 0]).astype(int)
        errors[g] |= dict(zip(numbers, error[g, ::-1], strict=True))
        consistent(state, g, known[g], errors[g], capacity)
  assert_array_equal(state.inserted, [len(e) for e in ever])
  assert min(len(e) for e in ever) > 10 * capacity


def evicted(made, state, new):
  """How often of 4000 times each goes when `new` comes, by the number of its observation."""
  def held(key):
    after = made.add(state, jnp.arange(1), together(new), key[None], jnp.int32(0)).slots
    there = after.eviction[0][0, :after.free.shape[1]] > 0
    return jnp.where(there, after.transitions.obs[0, :, 0], -1.0)
  after = np.asarray(jax.jit(lambda keys: jax.lax.map(held, keys))(keys(4, 4000))).astype(int)
  return 4000 - np.bincount(after[after >= 0])


def full(capacity, num_envs, steps, adds, n_step):
  """A prioritised replay of one group after so many adds, none with an invalid row."""
  made = memory('prioritised', capacity, num_envs, steps, n_step=n_step)
  rows, error = story(np.random.default_rng(3), steps * (adds + 1), num_envs, 0)
  parts = list(cut(rows._replace(valid=np.ones_like(rows.valid)), error, steps, n_step))
  state = made.init(1, parts[0])
  for part in parts[:-1]:
    state = made.add(state, jnp.arange(1), together(part), keys(0, 1), jnp.int32(0))
  return made, state, parts[-1], error.reshape(-1) + LEAST


def test_one_too_many_evicts_by_the_power_of_the_td_error():
  made, state, new, error = full(40, 1, 1, adds=41, n_step=1)
  assert int(state.size[0]) == 40
  counts, mass = evicted(made, state, new), error[:41]
  assert len(counts) == 41 and counts.sum() == 4000
  assert chi_square(counts, mass**-0.4) > 1e-3
  assert max(chi_square(counts, mass**power) for power in (-0.2, -0.6, 0.4)) < 1e-6


def test_several_too_many_are_evicted_alike_wherever_they_are():
  """More are drawn than go. About as often as -0.4 has it: none can go twice."""
  made, state, new, error = full(50, 2, 4, adds=8, n_step=2)
  new.starts[:, 1] = False
  counts = evicted(made, state, new)
  there = np.flatnonzero(state.slots.eviction[0][0])
  number = np.asarray(state.slots.transitions.obs[0, there, 0]).astype(int)
  assert len(there) == state.size[0] == 50
  columns = np.stack([np.ones(50), np.log(error[number]), there / 58], axis=1)
  power, place = np.linalg.lstsq(columns, np.log(counts[number]))[0][1:]
  assert abs(power + 0.4) < 0.05 and abs(place) < 0.2


# The ring, on what EnvPool gives.

SHAPE = dict(img_height=24, img_width=24)
PLAYED = {'Breakout-v5': dict(max_episode_steps=60, episodic_life=True, **SHAPE),
          'Pong-v5': dict(max_episode_steps=8, **SHAPE)}


def q_values(params, obs):
  q = obs.reshape(len(obs), -1).astype(jnp.float32) @ params
  return q, jnp.max(q, axis=1)


@functools.cache
def played(task):
  """(weights, 10 (Rollout, Experience) of each of two shards); rollout i has (1 + i/10) weights.

  The rewards are made up: so few steps earn hardly any.
  """
  spec = envpool_envs.make_spec(task, PLAYED[task])
  shards = [envpool_envs.EnvPoolVectorEnv(task, PLAYED[task], env_seeds(0, i, 0, 5), 1)
            for i in range(2)]
  pools, policy = RolloutProgram(shards), policies.epsilon_greedy(spec.num_actions)
  state = priorities.initial_state(rollouts.initial_state(
      shards, list(keys(7)), exploration=[jnp.linspace(0.4, 1.0, 5) for _ in range(2)]), N)
  rollout = rollouts.make_rollout(
      shards, by_rows(q_values), policy, 20, spec.stack, action_value=lambda params, obs, q, action:
      jnp.take_along_axis(q, action[:, None], axis=1)[:, 0])

  def both(params, state):
    seen = []
    def paid(*args):
      state, made = rollout(*args)
      seen.extend(m._replace(reward=jnp.cos(1000 * m.behaviour_value)) for m in made)
      return state, tuple(seen)
    state, made = priorities.with_priorities(paid, N, GAMMA)(params, state)
    whole = [m._replace(obs=frames.stacks(m.obs)) for m in seen]
    return state, list(zip(whole, made, strict=True))
  weights = np.float32(np.random.default_rng(6).normal(size=(4 * 24 * 24, spec.num_actions)) / 1e3)
  program, out = pools.load(both, (weights, state), (1,)), []
  for i in range(10):
    state, made = program(weights * np.float32(1 + i / 10), state)
    out.append(jax.tree.map(np.asarray, made))
  pools.close()
  return weights, list(zip(*out, strict=True))


def test_what_is_played_meets_resets_of_every_kind():
  """Of the stacks after a reset some hold the new frame alone, some go on from a lost life."""
  for task in PLAYED:
    rows, *_ = (in_a_row([rollout for rollout, _ in shard]) for shard in played(task)[1])
    alone = (rows.obs[1:] == rows.obs[1:, :, :1]).all(axis=(2, 3, 4)) & ~rows.valid
    assert alone.any() and rows.truncated.any()
    assert np.any(alone != ~rows.valid) == rows.terminated.any() == (task == 'Breakout-v5')
  # In Pong, both between two rollouts: the reset, and the first stack after one.
  assert not rows.valid[20::20].all() and alone[19:-1:20].any()


@pytest.mark.parametrize('task', PLAYED)
def test_initial_priorities_are_td_errors_by_the_values_of_the_acting_network(task):
  weights, shards = played(task)
  for shard in shards:
    rows, given = in_a_row([rollout for rollout, _ in shard]), [made for _, made in shard]
    q = rows.obs[:-1].reshape(200, 5, -1) @ weights.astype(np.float64)
    q *= 1 + np.arange(200)[:, None, None] // 20 / 10
    priority, starts = (np.concatenate([getattr(e, name) for e in given])
                        for name in ('priority', 'starts'))
    assert_array_equal(starts, np.concatenate([np.zeros((N, 5), bool), rows.valid[:-N]]))
    for t, e in np.argwhere(rows.valid[:-N]):
      _, action, total, gamma, _, stop = walk(rows, t, e)
      error = total + gamma * q[stop, e].max() - q[t, e, action]
      assert priority[t + N, e] == pytest.approx(abs(error), rel=1e-4, abs=1e-5)


def content(obs, action, reward, discount, next_obs, added):
  return sorted((obs[i].tobytes(), next_obs[i].tobytes(), int(action[i]), int(added[i]),
                 round(float(discount[i]), 4), float(reward[i])) for i in range(len(obs)))


@pytest.mark.parametrize('capacity', [123, 700])
def test_the_ring_holds_the_newest_transitions_as_envpool_gave_them(capacity):
  """An exponent of 0 and three times as many draws as transitions: every one is drawn."""
  made, rows = memory('fifo', capacity, 5, 20, stack=4, exponent=0.0), -(-capacity // 5)
  given = [[e for shard in played(task)[1] for _, e in shard] for task in PLAYED]
  clock, state = [[], []], made.init(2, given[0][0])
  known = []
  for task in PLAYED:
    whole = [in_a_row([rollout for rollout, _ in shard]) for shard in played(task)[1]]
    known.append([(s * 201 + t, s * 10 + t // 20, walk(whole[s], t, e)) for s in range(2)
                  for t, e in np.argwhere(whole[s].valid[:-N])])
  for turn in range(20):
    goes = [True, turn != 4]  # group 1 lags from here on
    for g in range(2):
      clock[g] += [turn] * goes[g]
    news = together(*(given[g][len(clock[g]) - 1] for g in (1, 0)))
    state = made.add(state, jnp.array([1 if goes[1] else 2, 0]), news, keys(turn), jnp.int32(turn))
    drawn = jax.tree.map(np.asarray, made.sample(state, keys(turn), 3 * rows * 5))
    for g in range(2):
      count = len(clock[g])
      head = (count - 1) // 10 * 201 + ((count - 1) % 10 + 1) * 20  # the newest frame's row
      complete = [k for k in known[g] if k[0] + N < head]
      there = [k for k in complete if k[0] >= head - N - rows]
      assert (state.size[g], state.inserted[g]) == (len(there), len(complete))
      first = np.unique(drawn.place[g], return_index=True)[1]
      got = content(*(x[g, first] for x in drawn.transition))
      want = content(*zip(*((*walked[:5], clock[g][c]) for _, c, walked in there), strict=True))
      assert [x[:5] for x in got] == [x[:5] for x in want]
      assert_allclose([x[5] for x in got], [x[5] for x in want], atol=1e-6)


# Memory.


def test_a_transition_of_atari_frames_takes_little_more_than_a_frame():
  made = memory('fifo', 2_000_000, 360, 50, stack=4)
  like = priorities.shapes(360, (4, 84, 84), np.uint8, 4, policies.epsilon_greedy(18))
  state = jax.eval_shape(lambda: made.init(1, like))
  size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert 84 * 84 < size / 2_000_000 <= 7300
