"""Checks of an algorithm of one's own, for its tests.

  import podracer_jit as pj
  pj.testing.check(A2C)
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from podracer_jit import options, parts, schedules
from podracer_jit.agents import action_masks, networks, policies, running_moments
from podracer_jit.experiment import build, config_dict, schema, trial
from podracer_jit.experiment.resolve import changed, placement_of, resolve
from podracer_jit.learner import updates
from podracer_jit.learner.from_replay import FromReplay
from podracer_jit.learner.from_rollouts import FromRollouts, concatenate
from podracer_jit.learner.updates import Draw
from podracer_jit.losses.algorithm import Algorithm
from podracer_jit.numerics.groups import Groups
from podracer_jit.runtime import host, placement
from podracer_jit.types import TrainState

# Methods that are called before there is a count of steps.
_WITHOUT_STEPS = frozenset({'init', 'init_target', 'acting'})
_LARGEST_CONSTANT = 4096  # numbers of an array that a method may hold
# Differences that may be rounding, relative to a number and to the largest one beside it.
_CLOSE = 1e-3
_CLOSE_TO_LARGEST = 1e-6


def check(algorithm: type[Algorithm] | Algorithm,
          config: Mapping[str, Any] | config_dict.Fields | None = None) -> list[str]:
  """Checks what an algorithm must hold so that a training computes what its author means.

  The algorithm goes the way of a training: a config names it, real environments are stepped, and
  updates are made.

  - Shapes: each method returns what its interface says.
  - Pure functions: methods call nothing of Python, hold no state, and read their arguments only;
    `acting` computes nothing.
  - Action masks: if the task has one, no action of a rollout is illegal.
  - Sums: the gradient of a minibatch is the sum of the gradients of its parts.
  - Bits: an update on two devices equals the update on one.

  Args:
    algorithm: a class at the top level of a module, or an instance with options.
    config: a config for it, such as `pj.load_config` returns; its loss is replaced, and its
      scheme, its placement and the sizes of its replay. None: a small config with an `mlp` on
      CartPole or, for algorithms that read an action, on Pendulum.

  Returns:
    A line for each check: what was checked, or what was not and why.

  Raises:
    AssertionError: something does not hold; the message is one line and names the method.
  """
  try:
    return list(_checks(algorithm, config))
  except ValueError as error:
    raise AssertionError(str(error)) from error.__cause__


def _checks(algorithm: type[Algorithm] | Algorithm, config: Any) -> Iterator[str]:
  """Makes the checks in order; yields their lines.

  Raises:
    ValueError: see `check`.
  """
  config = _with_loss(algorithm, config)
  host.prepare_host_for_any(placement_of(config), deterministic=True)
  experiment = resolve(config)
  run = build.make_run(changed(experiment, **_small_and_simple(experiment)))
  calls = _calls(run)
  yield f'shapes: {", ".join(calls)} return what their interfaces say'

  for method, args in calls.items():
    _check_pure(run, method, args)
  yield 'pure functions: they read their arguments only, call nothing of Python and keep no state'

  case = _Case(run, calls, *_collect(run))
  if run.experiment.spec.action_mask is not None:
    yield _check_legal(case)
  if run.experiment.num_grad_shards == 1:
    yield ('not checked, sums and bits: an odd number of environments has no halves; env.num_envs '
           f'is {run.experiment.env.num_envs}')
    return
  yield _check_sums(case)
  yield _check_bits(case)

# Random numbers that do not depend on the key, and are the same for each element of an array.
_EVEN = random.define_prng_impl(
    key_shape=(1,), seed=lambda seed: jnp.zeros(1, jnp.uint32),
    split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
    random_bits=lambda key, width, shape: jnp.full(shape, 0x5A5A5A5A, f'uint{width}'),
    fold_in=lambda key, data: key, name='even', tag='even')


class _Case(NamedTuple):
  """An algorithm in a run, and what it learns from."""

  run: build.Run
  calls: Mapping[str, tuple[Any, ...]]  # the shapes of what each method gets
  state: TrainState  # of update 0, on one device
  experiences: Sequence[Any]  # of rollouts with it


# The config.


def _with_loss(algorithm: type[Algorithm] | Algorithm, config: Any) -> config_dict.Fields:
  """Returns a config whose loss is the algorithm."""
  cls = algorithm if isinstance(algorithm, type) else type(algorithm)
  if not issubclass(cls, Algorithm):
    raise ValueError('algorithm: must be a class derived from Algorithm, or an instance of one; '
                     f'got {options.shown(algorithm)}')
  if '.' in cls.__qualname__:
    raise ValueError(f'algorithm: {cls.__qualname__} is inside of a function or a class, where no '
                     f'config can name it; move it to the top level of {cls.__module__}')
  name = f'{cls.__module__}:{cls.__qualname__}'
  if parts.find('algorithm', name, {}) is not cls:
    raise ValueError(f'algorithm: {name} is another class now, since its module was loaded again')

  if not (config is None or hasattr(config, 'items') and 'loss' in config):
    raise ValueError('config: must be a whole config, such as pj.load_config returns, got '
                     f'{options.shown(config)}')
  fields = _small(name) if config is None else config_dict.as_fields(config)
  with fields.unlocked():
    schema.choose(fields, 'loss', name)
  if algorithm is not cls:
    for option in options.meanings(cls):
      value = getattr(algorithm, option)
      fields.loss[option] = str(value) if isinstance(value, schedules.Schedule) else value
  return fields


def _small(name: str) -> config_dict.Fields:
  """Returns a config for an algorithm of this name, which computes for seconds only."""
  loss: type[Algorithm] = schema.find_part('loss', name)
  has_torso = loss.network_role == networks.TORSO
  config = config_dict.config(name, 'mlp' if has_torso else 'deterministic', 'adam',
                              unroll_length=16)
  config.env.task = 'Pendulum-v1' if loss.policy_reads == policies.ACTION else 'CartPole-v1'
  config.env.num_envs = 8
  config.env.max_episode_steps = 12  # some episodes are cut, others end before
  for field in ('hidden',) if has_torso else ('actor_hidden', 'critic_hidden'):
    config.network[field] = (16,)
  config.placement.xla_threads = 2
  if loss.learns_from_replay:
    config.replay.batch_size = 32
  else:
    config.num_minibatches = 2
    config.num_epochs = 2
  return config


def _small_and_simple(experiment: schema.Experiment) -> dict[str, Any]:
  """Returns changes of a config: one actor, two gradient groups, and a replay of a few rollouts."""
  num_envs = experiment.env.num_envs
  groups = 1 + (num_envs % 2 == 0)
  place = schema.ONE_DEVICE | {'actor_platform': experiment.placement.actor_platform}
  changes = dict(scheme='sync', num_shards=1, env_batch=0, exact_reduce=True,
                 num_grad_shards=groups, placement=place)
  if num_envs // groups % experiment.num_minibatches:
    changes['num_minibatches'] = 1
  if experiment.replay:
    changes['replay'] = dict(
        capacity=experiment.batch_rows * _num_rollouts(experiment), min_size=1,
        batch_size=max(4, experiment.replay.batch_size // 4 * 4), params_every=1,
        samples_per_insert=0.0)
  return changes


def _num_rollouts(experiment: schema.Experiment) -> int:
  """Returns the number of rollouts after which some items are complete."""
  if not experiment.replay:
    return 1
  return 2 + experiment.items.length // experiment.unroll_length


# Shapes, and pure functions.


def _calls(run: build.Run) -> dict[str, tuple[Any, ...]]:
  """Returns the shapes of what each method gets, by the method.

  Raises:
    ValueError: a method returns something else than its interface says.
  """
  state = run.experiment.algorithm.state_shapes
  first = {'init': (jax.eval_shape(jax.random.key, 0),), 'init_target': (state.params,),
           'acting': (state,)}
  return first | trial.check(run)


def _check_pure(run: build.Run, method: str, args: tuple[Any, ...]) -> None:
  """Checks that a method is a pure function.

  Args:
    run: has the algorithm.
    method: the name of the method.
    args: the shapes of its arguments.

  Raises:
    ValueError: it is not.
  """
  def wrong(problem: str) -> ValueError:
    return ValueError(f'{method} of {run.experiment.loss_name}: {problem}')

  jaxpr, state = _trace(run, method, args)
  names = _names(jaxpr)
  of_python = [name for name in names
               if any(word in name for word in ('callback', 'debug', 'infeed', 'outfeed'))]
  if of_python or jaxpr.effects:
    what = ', '.join(of_python or map(str, jaxpr.effects))
    raise wrong(f'calls Python from the compiled program ({what}); leave callbacks and prints out, '
                "and return numbers to log as terms of the loss's Aux")
  if state:
    raise wrong(f'keeps state on self ({", ".join(state)}), but it is traced once and then runs '
                'compiled; keep it in params or in init_target')
  if not _are_equal(jaxpr, _trace(run, method, args)[0]):
    raise wrong('two traces differ, so it reads something beside its arguments, such as numbers of '
                'numpy.random, the time or a counter; draw from its key, and count in the state')
  for constant in _constants(jaxpr):
    if np.size(constant) > _LARGEST_CONSTANT:
      raise wrong(f'holds an array {np.shape(constant)} that is not among its arguments; keep it '
                  'in params (init) or in init_target, as checkpoints do')
  if method == 'acting' and names:
    raise wrong(f'computes ({", ".join(names)}); it must select arrays only, and act computes')


def _trace(run: build.Run, method: str, args: tuple[Any, ...]) -> tuple[ClosedJaxpr, list[str]]:
  """Traces a method; returns also the names of attributes that it has set."""
  bound = run.experiment.algorithm
  new: list[str] = []

  def call(steps, *args):
    algorithm = bound if method in _WITHOUT_STEPS else bound.at(steps)
    before = set(vars(algorithm))
    result = getattr(algorithm, method)(*args)
    cached = {name for cls in type(algorithm).__mro__ for name, value in vars(cls).items()
              if isinstance(value, functools.cached_property)}
    new.extend(sorted(set(vars(algorithm)) - before - cached))
    return result

  return jax.make_jaxpr(call)(bound.state_shapes.steps, *args), new


def _trace_on(devices: Sequence[jax.Device], run: build.Run, method: str, args: tuple[Any, ...]
              ) -> Jaxpr:
  """Traces a method within a program for several devices."""
  everywhere = jax.sharding.PartitionSpec()
  function = jax.shard_map(trial.method(run, method), mesh=placement.mesh_of(devices),
                           in_specs=everywhere, out_specs=everywhere, check_vma=False)
  jaxpr = jax.make_jaxpr(function)(run.experiment.algorithm.state_shapes.steps, *args)
  return next(equation.params['jaxpr'] for equation in _equations(jaxpr)
              if 'jaxpr' in equation.params)


def _jaxprs(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr | ClosedJaxpr]:
  """Yields a jaxpr, and those of the functions that it calls."""
  def is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)

  yield jaxpr
  for equation in jaxpr.eqns:
    for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
      if is_jaxpr(x):
        yield from _jaxprs(x)


def _equations(jaxpr: ClosedJaxpr | Jaxpr) -> list[JaxprEqn]:
  """Returns the equations of a jaxpr, and of the functions that it calls."""
  return [equation for each in _jaxprs(jaxpr) for equation in each.eqns]


def _names(jaxpr: ClosedJaxpr) -> list[str]:
  """Returns the names of the primitives of a jaxpr."""
  return sorted({equation.primitive.name for equation in _equations(jaxpr)})


def _constants(jaxpr: ClosedJaxpr | Jaxpr) -> list[Any]:
  """Returns the arrays and numbers that a jaxpr holds, in order."""
  arrays = [x for each in _jaxprs(jaxpr) for x in getattr(each, 'consts', ())]
  return arrays + [x.val for equation in _equations(jaxpr) for x in equation.invars
                 if isinstance(x, Literal)]


def _are_equal(a: ClosedJaxpr | Jaxpr, b: ClosedJaxpr | Jaxpr) -> bool:
  """Returns whether two traces of a function have the same equations and hold the same numbers."""
  def held(jaxpr: ClosedJaxpr | Jaxpr) -> list[bytes]:
    return [np.asarray(jax.random.key_data(x) if _is_key(x) else x).tobytes()
            for x in _constants(jaxpr)]

  return str(a) == str(b) and held(a) == held(b)


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(getattr(x, 'dtype', np.float32), jax.dtypes.prng_key)


# Experience, and sums over the parts of a minibatch.


def _collect(run: build.Run) -> tuple[TrainState, list[Any]]:
  """Makes rollouts of the environments with the first parameters.

  Returns:
    The state of update 0, and the experience of each rollout, on one device.
  """
  state = run.initial_state()
  with ExitStack() as stack:
    (actor,) = build.make_actors(run, build.Snapshot(state), stack)
    given = placement.put_params(run.experiment.algorithm.for_actors(state), actor.device)
    pool = actor.rollout_program
    with trial.in_loss(run, 'act'):
      program = pool.load(run.acting.rollout(pool.vector_envs), (given, actor.state), donate=(1,))
    acting = actor.state
    experiences = []
    for _ in range(_num_rollouts(run.experiment)):
      acting, experience = program(given, acting)
      experiences.append(jax.device_get(concatenate(experience)))
  return state, experiences


def _check_legal(case: _Case) -> str:
  """Checks that the actions of valid rows are legal; returns a line.

  Raises:
    ValueError: one is not.
  """
  experiment = case.run.experiment
  mask = experiment.spec.action_mask
  assert mask is not None
  rows = 0
  for experience in case.experiences:
    legal = action_masks.split(experience.obs[:-1], experiment.spec)[1]
    ends = np.cumsum(action_masks.choices_of(experiment.spec))
    first = np.concatenate([[0], ends[:-1]])  # of the choices of each element of an action
    action = experience.action.reshape(*experience.valid.shape, -1)
    is_legal = np.take_along_axis(np.asarray(legal), first + action, axis=-1).all(axis=-1)
    wrong = np.argwhere(experience.valid & ~is_legal)
    if len(wrong):
      taken = experience.action[tuple(wrong[0])]
      raise ValueError(f'act of {experiment.loss_name}: takes the action {taken}, which '
                       f'{mask.name} says is illegal; draw it from what '
                       'self.network returns first')
    rows += int(experience.valid.sum())
  return f'action masks: the actions of {rows} steps are legal'


class _Minibatch(NamedTuple):
  """A minibatch, whole and in two halves."""

  source: Any  # what is read from
  # Each reads (see `updates.make_gradients`), with what it reads.
  whole: tuple[Callable, Draw]
  halves: tuple[Callable, Draw]


def _check_sums(case: _Case) -> str:
  """Checks that a minibatch's gradient is the sum of its parts' gradients; returns a line.

  Raises:
    ValueError: it is not, or the terms, 'valid' or new priorities depend on the parts.
  """
  experiment = case.run.experiment
  make = _drawn if experiment.replay else _of_rollout
  # Away from the first parameters, whose policy may be uniform and whose heads may be zero; but a
  # network may be undefined there.
  for params in (_moved(case.state.params), case.state.params):
    moved = case._replace(state=case.state._replace(params=params))
    minibatch = make(moved)
    whole = _sums(moved, minibatch, parts=1, key=jax.random.key(0))
    if all(np.isfinite(x).all() for x in jax.tree.leaves(whole)):
      break
  else:
    raise ValueError(f'{_gradient(case)} of {experiment.loss_name}: is NaN or infinite with the '
                     'first parameters')

  other = _sums(moved, minibatch, parts=1, key=jax.random.key(1))
  key, how = jax.random.key(0), ''
  if not all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(other))):
    # Parts would draw other numbers than the whole.
    key, how = jax.random.key(0, impl=_EVEN), ', where all random numbers are equal'
    whole = _sums(moved, minibatch, parts=1, key=key)
  items = minibatch.whole[1].index.size
  several = (2, 4) if items % 4 == 0 else (2,)
  for count in several:
    _compare(case, whole, _sums(moved, minibatch, count, key), count)
  return (f'sums: gradient, terms and valid of {items} items are those of '
          f'{" and of ".join(map(str, several))} parts together{how}')


def _gradient(case: _Case) -> str:
  """Returns the name of the method that a user has written for the gradient."""
  own = type(case.run.experiment.algorithm).gradient is not Algorithm.gradient
  return 'gradient' if own else 'loss'


def _moved(params: Any) -> Any:
  """Returns parameters with numbers of normal size added to all weights, and to no moments."""
  leaves, treedef = jax.tree.flatten(running_moments.weights(params))
  rng = np.random.default_rng(0)

  def moved(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    deviation = 0.1 if x.ndim < 2 else np.prod(x.shape[:-1]) ** -0.5
    return x + (deviation * rng.normal(size=x.shape)).astype(x.dtype)

  weights = jax.tree.unflatten(treedef, map(moved, leaves))
  return running_moments.with_moments_of(weights, params)


def _of_rollout(case: _Case) -> _Minibatch:
  """Returns all items of the last rollout as a minibatch.

  Raises:
    ValueError: the targets of an environment depend on the other environments of its group.
  """
  experiment = case.run.experiment
  num_envs = experiment.env.num_envs
  whole, halves = (FromRollouts(experiment.algorithm, Groups(count, num_envs // count), 1, 1, 0)
                   for count in (1, 2))
  rollout = case.experiences[-1]
  view = updates.view(case.state)
  key = updates.update_key(case.state)
  prepared = jax.jit(halves.prepare)(view, key, rollout)
  beside = jax.jit(whole.prepare)(view, key, rollout).targets
  for a, b in zip(*map(jax.tree.leaves, jax.device_get((prepared.targets, beside))), strict=True):
    if not _are_close(a[rollout.valid], b[rollout.valid]):
      raise ValueError(f'targets of {experiment.loss_name}: the rows of an environment depend on '
                       'the other environments of its gradient group; what a whole minibatch '
                       'shares belongs into statistics')

  draw = jax.jit(halves.draw)(view, prepared, 0)
  row, env = jnp.divmod(draw.index, num_envs // 2)
  index = row * num_envs + jnp.array([[0], [num_envs // 2]]) + env
  return _Minibatch(prepared, (whole.read, draw._replace(index=index.reshape(1, -1))),
                    (halves.read, draw))


def _drawn(case: _Case) -> _Minibatch:
  """Returns a minibatch that is drawn from a replay."""
  experiment = dataclasses.replace(case.run.experiment, num_grad_shards=1)
  learner = build.make_learner(experiment, case.run.place.mesh)
  source = learner.source
  assert isinstance(source, FromReplay) and experiment.replay is not None
  state = learner.allocate(case.state)
  insert = jax.jit(source.insert)
  for experience in case.experiences:
    state, _ = insert(state, experience, jnp.arange(1))
  assert state.replay is not None
  place, probability = source.store.draw(state.replay, state.key, source.group_batch)
  weight = (jnp.min(probability) / probability) ** experiment.replay.importance_exponent
  whole = Draw(place[None], weight[None], float(source.group_batch), None)
  halves = whole._replace(index=place.reshape(2, -1), weight=weight.reshape(2, -1))
  return _Minibatch(state.replay, (source.read, whole), (source.read, halves))


def _sums(case: _Case, minibatch: _Minibatch, parts: int, key: jax.Array) -> tuple[Any, Any]:
  """Returns the sums of gradients and Aux over the parts of a minibatch, and the new priorities.

  Args:
    case: has the algorithm and the parameters.
    minibatch: the minibatch.
    parts: 1, 2 for both halves, 4 for two microbatches of each half.
    key: of the loss.
  """
  algorithm = case.run.experiment.algorithm
  read, draw = minibatch.whole if parts == 1 else minibatch.halves
  most_rows = draw.index.shape[1] // 2 * algorithm.items().network_rows if parts == 4 else 0

  @jax.jit
  def compute(state, source, draw, key):
    """Returns the sum of the gradients, and the priorities.

    Args:
      state: the view of the train state.
      source: what `read` takes the rows from.
      draw: which rows each group has.
      key: of the loss.
    """
    groups = Groups(len(draw.index), 1)
    gradients = updates.make_gradients(algorithm, read, groups, most_rows)
    sums, priority = gradients(state, source, draw, key)
    return groups.total(sums), priority

  with trial.in_loss(case.run, _gradient(case)):
    return jax.device_get(compute(updates.view(case.state), minibatch.source, draw, key))


def _compare(case: _Case, whole: tuple[Any, Any], sums: tuple[Any, Any], parts: int) -> None:
  """Compares the sums over the parts of a minibatch with the whole.

  Args:
    case: has the algorithm.
    whole: the results of `_sums` for the whole.
    sums: its results for the parts.
    parts: their number.

  Raises:
    ValueError: they differ by more than rounding.
  """
  subject = f'{_gradient(case)} of {case.run.experiment.loss_name}'
  ((grads, aux), priority), ((other_grads, other_aux), other_priority) = whole, sums
  size = _norm(grads)
  rounding = _rounding(case)
  if not all(_norm(a - b) <= rounding * _norm(a) + min(rounding, _CLOSE_TO_LARGEST) * size
             for a, b in zip(*map(jax.tree.leaves, (grads, other_grads)), strict=True)):
    difference = _norm(jax.tree.map(np.subtract, grads, other_grads)) / max(size, 1e-30)
    raise ValueError(f'{subject}: the sum of the gradients of {parts} parts differs from the '
                     f'gradient of the whole by {100 * difference:.3g} %; divide by batch.count, '
                     'not by the number of rows of the part, and take what the rows share from '
                     'batch.statistics')

  sums_of = aux.terms | {'valid': aux.valid}
  others = other_aux.terms | {'valid': other_aux.valid}
  for name, total in sums_of.items():
    if not np.isclose(others[name], total, rtol=_CLOSE, atol=_CLOSE_TO_LARGEST * aux.valid):
      what = f'term {name!r}' if name in aux.terms else 'number of valid rows'
      raise ValueError(f'{subject}: the {what} of its Aux is {total:.6g} for a whole minibatch, '
                       f'but {others[name]:.6g} for its {parts} parts together; it must be a sum '
                       'over the valid rows of the part, as Aux.of makes it')
  if priority is not None and not _are_close(priority.ravel(), other_priority.ravel()):
    raise ValueError(f'{subject}: the priority of an item depends on the other items of its part')


def _rounding(case: _Case) -> float:
  """Returns the relative difference of two gradients that may be rounding."""
  jaxpr, _ = _trace(case.run, 'gradient', case.calls['gradient'])
  types = {getattr(x.aval, 'dtype', None)
           for equation in _equations(jaxpr) for x in equation.outvars}
  if types & {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}:
    return 0.05
  if jax.default_backend() != 'cpu':
    return 1e-3  # it may multiply in fewer bits, and parts of another size by another algorithm
  # Sums of numbers of either sign lose more digits the more there are.
  return 1e-6 * (2 * case.run.experiment.batch_rows) ** 0.5


def _norm(tree: Any) -> float:
  return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))))


def _are_close(a: np.ndarray, b: np.ndarray) -> bool:
  """Returns whether arrays differ by rounding only."""
  largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
  return np.allclose(a, b, rtol=_CLOSE, atol=_CLOSE_TO_LARGEST * largest, equal_nan=True)


# Bits on two devices.


def _check_bits(case: _Case) -> str:
  """Checks that an update on two devices equals the update on one, to the last bit.

  Raises:
    ValueError: it does not.
  """
  devices = jax.devices()
  if len(devices) < 2:
    devices = jax.devices('cpu')
  if len(devices) < 2:
    return ('not checked, bits: this process has one device; call the check before anything uses '
            'JAX, or set JAX_NUM_CPU_DEVICES=2 in its environment')
  one, two = (_after_updates(case, devices[:count]) for count in (1, 2))
  named = jax.tree_util.tree_leaves_with_path(one)
  for (path, a), b in zip(named, jax.tree.leaves(two), strict=True):
    if a.tobytes() != b.tobytes():
      where = jax.tree_util.keystr(path, simple=True, separator='/')
      method = next((method for method, args in case.calls.items() if not _are_equal(*(
          _trace_on(devices[:count], case.run, method, args) for count in (1, 2)))), 'an update')
      raise ValueError(f'{method} of {case.run.experiment.loss_name}: {where} has other bits '
                       'after an update on two devices than on one; no method may depend on the '
                       'devices')
  return 'bits: an update on two devices gives the same parameters and metrics as on one'


def _after_updates(case: _Case, devices: Sequence[jax.Device]) -> Any:
  """Returns the trained part of a state after an update with each experience, and its metrics."""
  mesh = placement.mesh_of(devices)
  learner = build.make_learner(case.run.experiment, mesh)
  state = learner.allocate(placement.replicate(case.state, mesh))
  for experience in case.experiences:
    state, metrics = learner.program(state, jax.device_put(experience, placement.by_env(mesh)))
  # A dict would be compared in the order of its names.
  return jax.device_get(OrderedDict(params=state.params, opt_state=state.opt_state,
                                    target=state.target, metrics=metrics))
