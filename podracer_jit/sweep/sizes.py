"""Checks the configs of a sweep before any member begins, and estimates what each needs.

This uses JAX, which a sweep itself does not load; so it runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from podracer_jit.experiment import build, memory, schema
from podracer_jit.experiment.flags import fields_of
from podracer_jit.experiment.resolve import changed, resolve
from podracer_jit.experiment.schema import Experiment
from podracer_jit.runtime import host
from podracer_jit.sweep.fitting import Checked, Size
from podracer_jit.sweep.members import SEED, Member, together
from podracer_jit.training import restoring, seeds
from podracer_jit.workdir import record

# Memory of the smallest run, which is that of Python, JAX and programs: 600 MB were measured.
_OF_PROCESS = 600_000_000
_OF_UPDATE = 1_500  # bytes that an update adds to metrics and receipts
_CHECKPOINTS = 2  # the newest ones, which always stay


def check(groups: Sequence[Sequence[Member]], configs: Mapping[str, Any]) -> Checked:
  """Checks the config of each member, and estimates the sizes.

  Args:
    groups: lists of members of which only the seeds differ, and follow each other. Such a list
      becomes one member if one program can train them.
    configs: what --config gave before.

  Raises:
    ValueError: a config is wrong; the message begins with the name of the member. Or a config is
      another one than before.
  """
  checked: list[Member] = []
  sizes: dict[str, Size] = {}
  by_spec: dict[Any, Size] = {}
  now: dict[str, Any] = {}
  evaluates = True
  for first, *others in groups:
    if first.config not in now:
      now[first.config] = record.json_of(fields_of([f'--config={first.config}', *first.flags]))
      _check_equal(first.config, configs.get(first.config), now[first.config])
    try:
      experiment = resolve(fields_of(first._replace(num_seeds=None).arguments()))
      in_one = bool(others) and not any(seeds.problems(
          seeds.on_one_device(experiment), 1 + len(others)))
      if others:
        resolve(fields_of(others[-1]._replace(num_seeds=None).arguments()))  # the largest seed
      size = _size(experiment, by_spec)
      evaluates = evaluates and experiment.eval.every_updates > 0
    except ValueError as error:
      raise ValueError(f'{first.name}: {error}') from None
    group = [together([first, *others])] if in_one else [first, *others]
    checked += group
    for member in group:
      count = len(member.seeds)
      sizes[member.name] = Size(size.steps, _OF_PROCESS + count * size.memory, count * size.disk)
  return Checked(checked, sizes, now, evaluates)


def _check_equal(config: str, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
  """Checks that a config is what it was when the sweep began.

  Raises:
    ValueError: it is another experiment.
  """
  differing = record.differences(before, now, ('in --out', 'now')) if before else ()
  if differing:
    raise ValueError(f'--config={config}: is another experiment than that of the sweep in --out '
                     f'({"; ".join(differing)}); choose another --out')


def _size(experiment: Experiment, by_spec: dict[Any, Size]) -> Size:
  """Returns the size of a run; equal for tasks with equal observations and actions.

  Args:
    experiment: of the run.
    by_spec: sizes that are known; receives this one.
  """
  others = {name: value for name, value in experiment.fields.items() if name not in (SEED, 'env')}
  key = repr((experiment.spec._replace(task=''), dataclasses.replace(experiment.env, task=''),
              others))
  if key not in by_spec:
    # JAX starts once, so all are checked on one device.
    experiment = changed(experiment, placement=schema.ONE_DEVICE)
    host.prepare_host(experiment.placement, experiment.numerics.deterministic)
    run = build.make_run(experiment)
    memory.check(run)
    state = run.learner.state_shapes()
    replay = run.learner.replay_shapes() if experiment.checkpoint.replay else None
    longest = restoring.longest_replay(run)
    updates = -(-experiment.total_steps // experiment.batch_rows)
    disk = (_CHECKPOINTS * memory.nbytes((state, replay)) + _OF_UPDATE * updates
            + (longest.nbytes if longest else 0))
    used = sum(part.nbytes for part in memory.estimate(run))
    by_spec[key] = Size(experiment.total_steps, used, disk)
  return by_spec[key]
