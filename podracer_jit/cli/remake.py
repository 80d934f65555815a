"""Repeats an update of a run, on the run's devices, and writes all intermediate arrays.

python -m podracer_jit.cli.remake WORKDIR UPDATE OUT.npz [MODULE ...]

`podracer_jit compare --deep` starts this process for each of the two runs, since the size of XLA's
thread pool and the number of devices are fixed when JAX starts. The arrays of OUT.npz are named
'stage|leaf', in the order in which an update makes them. MODULEs may be imported if the run's
config names them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from podracer_jit.cli import quieten, rerun
from podracer_jit.errors import FINISHED, REFUSED
from podracer_jit.experiment import build
from podracer_jit.experiment.modules import allowed
from podracer_jit.learner.learner import RolloutLearner
from podracer_jit.learner.updates import update_key, view
from podracer_jit.numerics.deterministic import AXIS
from podracer_jit.play import evaluation
from podracer_jit.runtime import host, placement
from podracer_jit.runtime.output import complain
from podracer_jit.types import Rollout, TrainState
from podracer_jit.workdir import journal

Arrays = dict[str, np.ndarray]


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  quieten()
  _, workdir, update, out, *modules = argv
  try:
    np.savez(out, **remake(Path(workdir), int(update), allowed(modules)))
  except (ValueError, OSError) as error:
    complain(f'{workdir}: {" ".join(str(error).split())}')
    return REFUSED
  return FINISHED


def remake(workdir: Path, update: int, allow_modules: Collection[str]) -> Arrays:
  """Returns the arrays of an update by 'stage|leaf'.

  Args:
    workdir: the workdir of the run; its config has the placement.
    update: the number of the update.
    allow_modules: modules of a user's own parts that may be imported if the config names them.

  Raises:
    ValueError: the update cannot be repeated.
  """
  # This also checks that the run is deterministic.
  rerun_experiment = rerun.one_device_experiment(workdir, allow_modules, update)
  experiment = evaluation.read_experiment(workdir, allow_modules, update, on_one_device=False)
  headers, receipts, _ = journal.read_receipts(workdir)
  rerun.header_of(headers, receipts, update)
  host.prepare_host(experiment.placement, experiment.numerics.deterministic)
  run = build.make_run(experiment)

  def state_after(last: int) -> TrainState:
    """Returns the state after update `last`, computed by the run's own programs."""
    snapshot = rerun.snapshot_before(run, workdir, update)
    if snapshot.update == last:
      return run.learner.allocate(snapshot.state)
    return rerun.made(run, snapshot, last)

  before = jax.device_get(_to_compare(state_after(update - 1)))
  arrays = _named('state before the update', before)
  if isinstance(run.learner, RolloutLearner):
    # Only earlier updates are checked. This update may differ from its receipt: that is the reason
    # for comparing the runs.
    earlier = {number: line for number, line in receipts.items() if number < update}
    rerun_run = build.make_run(rerun_experiment)
    rollout = rerun.rerun(rerun_run, rerun.snapshot_before(rerun_run, workdir, update), update,
                          earlier)
    arrays |= _named('rollout', rollout._asdict())
    arrays |= _step_by_step(run.learner, state_after(update - 1), rollout)
  return arrays | _named('state after the update', _to_compare(state_after(update)))


def _to_compare(state: TrainState) -> dict[str, Any]:
  """Returns the arrays of a train state that are compared between two runs."""
  return {'params': state.params, 'opt_state': state.opt_state, 'target': state.target,
          'replay': state.replay}


def _step_by_step(learner: RolloutLearner, state: TrainState, rollout: Rollout) -> Arrays:
  """Returns the arrays of each gradient step, by separate programs on the run's devices."""
  mesh = learner.mesh
  programs = learner.gradient_programs(mesh, 1)
  updates = learner.update_programs
  batch = jax.device_put(rollout, NamedSharding(mesh, PartitionSpec(None, AXIS)))
  # Updates are made on the first device only.
  update_mesh = placement.mesh_of([mesh.devices.flat[0]])
  key = placement.replicate(update_key(state), mesh)
  state = placement.replicate(state, update_mesh)
  prepared = programs.prepare(placement.replicate(view(state), mesh), key, batch)
  arrays = _named('targets', prepared.targets) | _named('moments', prepared.batch_stats['moments'])
  for step in range(learner.gradient_steps):
    sums = programs.gradient(placement.replicate(view(state), mesh), prepared, step)
    stage = f'gradient step {step + 1}'
    gradient, _ = sums
    arrays |= _named(f'{stage}: gradient', gradient)
    state, _ = updates.step(state, placement.replicate(sums, update_mesh))
    arrays |= _named(f'{stage}: optimizer state', state.opt_state)
    arrays |= _named(f'{stage}: parameters', state.params)
  return arrays


def _named(stage: str, tree: Any) -> Arrays:
  """Returns the leaves of a tree by 'stage|leaf'."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {f'{stage}|{jax.tree_util.keystr(path, simple=True, separator="/")}': np.asarray(leaf)
          for path, leaf in leaves}


if __name__ == '__main__':
  sys.exit(main(sys.argv))
