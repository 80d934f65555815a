"""Repeats one update of a run from the checkpoint before it, and writes what it learned from.

  podracer_jit rerun --workdir=runs/pong --update=1234
  podracer_jit rerun --workdir=runs/pong --update=1234 --env=3

It runs on one device, wherever the run was, and checks every update on the way against the run's
receipts. It writes the rollout to WORKDIR/update_1234.npz (time-major arrays, named as in
types.Rollout) and the observations of environment --env to WORKDIR/update_1234.mp4.

Exit code: 0, 1 if an update differs from its receipt or something failed, 2 if it could not start.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from podracer_jit import loops
from podracer_jit.envs import frames
from podracer_jit.numerics.fingerprints import as_hex, canary
from podracer_jit.run import build, checkpoint, experiment, video
from podracer_jit.runtime import placement
from podracer_jit.schemes import wiring
from podracer_jit.schemes.table import SCHEMES
from podracer_jit.types import Rollout, TrainState


class Differs(RuntimeError):
  """The bits are not those of the receipts."""


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # precision of bounds we do not use
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'Where the run is.', flag_values=values)
  flags.DEFINE_integer('update', None, 'The update to repeat.', flag_values=values)
  flags.DEFINE_integer('env', 0, 'The environment whose observations to film.', flag_values=values)
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', flag_values=values)
  try:
    rest = values(list(argv))
    if values.help:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    workdir = _check(values, rest)
    config = checkpoint.read_config(workdir)
    _check_env(values.env, config)
    if not config['exact_reduce']:
      raise ValueError('the run has exact_reduce = False: its bits are those of its own devices')
    platform = config['placement']['actor_platform']
    config['placement'] |= checkpoint.ONE_DEVICE | {'actor_platform': platform}
    scheme = SCHEMES[config['scheme']]
    if not experiment.repeats(config):
      raise ValueError(f'{experiment.who_repeats_not(config)} takes things as they come, so '
                       'updates of the run cannot be made again')
    config['scheme'] = 'cleanba' if scheme.lag else 'sync'  # the same bits, rollouts in sight
    headers, receipts = checkpoint.read_receipts(workdir)
    header = _header(headers, receipts, values.update)
    placement.prepare_host(config['placement'])
    parts = build.make_parts(config)
    state = _state_before(parts, workdir, header)
  except (ValueError, OSError, flags.Error) as error:
    print(f'podracer_jit rerun: {" ".join(str(error).split())}', file=sys.stderr)
    return 2
  except KeyError as error:
    print(f'podracer_jit rerun: config.json of {workdir} lacks the field {error}', file=sys.stderr)
    return 2
  try:
    if header['canary'] != canary():
      print('podracer_jit rerun: the arithmetic here is not that of the run: expect other bits',
            file=sys.stderr)
    rollout = rerun(parts, state, header['segment'], values.update, receipts)
    _write(rollout, workdir / f'update_{values.update}', values.env, parts)
  except Exception as error:  # noqa: BLE001 - the one place where a failure becomes a message
    print(f'podracer_jit rerun: {type(error).__name__}: {error}', file=sys.stderr)
    return 1
  return 0


def _check(values: flags.FlagValues, rest: Sequence[str]) -> Path:
  if rest[1:]:
    raise ValueError(f'{rest[1]}: not a flag; flags begin with --')
  if not values.workdir or values.update is None:
    raise ValueError('--workdir and --update are needed: '
                     'podracer_jit rerun --workdir=runs/pong --update=10')
  return Path(values.workdir)


def _check_env(env: int, config: Mapping[str, Any]) -> None:
  if not 0 <= env < config['env']['num_envs']:
    raise ValueError(f'--env: must be from 0 to {config["env"]["num_envs"] - 1}, got {env}')


def _header(headers: Sequence[dict], receipts: Mapping[int, dict], update: int) -> dict:
  """Of the segment that holds the update."""
  if update not in receipts:
    raise ValueError(f'--update: there is no receipt of update {update}; there are those of 1 to '
                     f'{max(receipts, default=0)}')
  return max((h for h in headers if h['first_update'] <= update), key=lambda h: h['first_update'])


def _state_before(parts: wiring.Parts, workdir: Path, header: dict) -> TrainState:
  """The state that the segment began with."""
  before, first = header['first_update'] - 1, build.initial_state(parts)
  if before == 0:
    return first
  saved = checkpoint.Checkpoints(workdir, parts.config['checkpoint']['keep'])
  try:
    if before not in saved.updates():
      raise ValueError(f'--update: the checkpoint of update {before}, from which it would be made, '
                       f'is gone; there are those of {", ".join(map(str, saved.updates()))} '
                       '(checkpoint.keep says how many stay), and the first segment needs none')
    state = saved.restore(first, before)[0]
    return state._replace(replay=first.replay) if not state.replay else state
  finally:
    saved.close()


def rerun(parts: wiring.Parts, state: TrainState, index: int, update: int,
          receipts: Mapping[int, dict]) -> Rollout:
  """Runs segment `index` from its state up to the update; returns what that one learned from.

  Raises:
    Differs: an update on the way is not as its receipt says.
  """
  found = []

  def check(report):
    metrics = jax.device_get(report.metrics)
    for i in range(report.count):
      made = dict(update=int(metrics['update'][i]), batch=as_hex(metrics['batch'][i]),
                  params=as_hex(metrics['params'][i]))
      if made != receipts[made['update']]:
        raise Differs(f'update {made["update"]} is not what it was: {made}, its receipt '
                      f'{receipts[made["update"]]}')

  def watched(worker: loops.Worker) -> loops.Worker:
    def fire(carry, *batch):
      if int(carry.train.update) == update - 1:
        whole = placement.gather([item.value for item in batch], parts.place.mesh)
        found.append(jax.device_get(whole))
      return worker.fire(carry, *batch)
    return worker._replace(fire=fire) if worker.name == 'learner' else worker

  with build.segment(parts, state, index, update - int(state.update), check) as segment:
    loops.run([watched(worker) for worker in segment.workers])
  return found[0]


def _write(rollout: Rollout, path: Path, env: int, parts: wiring.Parts) -> None:
  rollout = rollout._replace(obs=np.asarray(frames.stacks(rollout.obs)))
  arrays = rollout._asdict() | rollout.episodes._asdict()
  del arrays['episodes']
  np.savez_compressed(path.with_suffix('.npz'), **arrays)
  print(f'{path.with_suffix(".npz")}: the rollout of {path.name}, as its receipt says')
  try:
    video.write(path.with_suffix('.mp4'), rollout.obs[:, env],
                parts.config['env'].get('gray_scale') is False, frame_rate=10)
    print(f'{path.with_suffix(".mp4")}: what environment {env} saw')
  except ValueError as error:
    print(error)
