"""The tasks, the peers that have them, and the measurements of a call."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

OURS = 'ours'
STEPS = 2**29  # of our trainings, which are ended before
PROGRAMS = Path(__file__).parent / 'programs'
SEEDS = 16
_CARTPOLE = ['--config=ppo_cartpole', '--config.network.separate_critic=True',
             '--config.loss.clip_value=True', '--config.loss.value_coef=0.5',
             '--config.loss.entropy_coef=0.01', '--config.optimizer.learning_rate=2.5e-4']


class Peer(NamedTuple):
  """A program that trains like one of our configs.

  Attributes:
    venv: name of its virtual environment in `venvs.PACKAGES`; '' for that of this command.
    program: a file of `programs/`.
    arguments: of the program, after the config and the file for records.
    has_torch: whether the number of PyTorch's threads has to be chosen.
    checkout: whether it needs a checkout.
  """

  venv: str
  program: str
  arguments: Sequence[str] = ()
  has_torch: bool = False
  checkout: bool = False


PEERS = {
    'sb3': Peer('torch', 'stable.py', ('sb3', 'gymnasium'), has_torch=True),
    'sb3_subproc': Peer('torch', 'stable.py', ('sb3', 'subproc'), has_torch=True),
    'sb3_envpool': Peer('torch', 'stable.py', ('sb3', 'envpool'), has_torch=True),
    'sbx': Peer('sbx', 'stable.py', ('sbx', 'gymnasium')),
    'sbx_envpool': Peer('sbx', 'stable.py', ('sbx', 'envpool')),
    'rejax': Peer('rejax', 'rejax_ppo.py'),
    'scanned': Peer('', 'scanned.py'),
    'cleanba': Peer('cleanba', 'checkouts.py', ('cleanba',), checkout=True),
    'cleanrl': Peer('torch', 'checkouts.py', ('cleanrl',), has_torch=True, checkout=True),
}


class Case(NamedTuple):
  """Trainings of one size.

  Attributes:
    title: what is trained, for the table.
    flags: of our training.
    peers: names of PEERS.
    seeds: trainings in one program; 0: one training.
    on_one_core: whether it is also measured on one core.
  """

  title: str
  flags: Sequence[str]
  peers: Sequence[str]
  seeds: int = 0
  on_one_core: bool = False


def _gymnax(task: str, num_envs: int, steps: int) -> list[str]:
  return [*_CARTPOLE, f'--config.env.task=gymnax:{task}', f'--config.env.num_envs={num_envs}',
          f'--config.unroll_length={steps}']


def _off_policy(config: str, *flags: str) -> list[str]:
  # Peers and we learn from the first batch on, so that no random actions are measured.
  return [f'--config={config}', '--config.replay.min_size=256', *flags]


_ONE_STEP = ('--config.scheme=fused', '--config.env.num_envs=1', '--config.unroll_length=1',
             '--config.replay.gradient_steps=1')
_WIDE = '--config.env.num_envs=32', '--config.unroll_length=1'
_GYMNAX_PEERS = ('scanned', 'rejax')
_STABLE_PEERS = ('sb3', 'sbx')
# The cases of each task. With 16,384 environments, shorter rollouts keep an update near a second.
TASKS: Mapping[str, Mapping[str, Case]] = {
    'pong_impala': {'pong_impala': Case(
        'IMPALA Nature CNN, Pong 128 x 20',
        ['--config=impala_atari:nature_cnn', '--config.network.centre=False',
         '--config.env.task=Pong-v5'], ('cleanba',))},
    'pong_ppo': {'pong_ppo': Case(
        'PPO Nature CNN, Pong 8 x 128, 4 epochs x 4',
        ['--config=ppo_atari_8', '--config.env.task=Pong-v5'],
        ('sb3', 'sb3_envpool', 'cleanrl'), on_one_core=True)},
    'cheetah_1x2048': {'cheetah_1x2048': Case(
        'PPO HalfCheetah 1 x 2048, 10 epochs x 32', ['--config=ppo_mujoco'], _STABLE_PEERS)},
    'cheetah_64': {'cheetah_64': Case(
        'PPO HalfCheetah 64 x 64, 2 epochs x 4', ['--config=ppo_mujoco_fast'],
        ('sb3_envpool', 'sbx_envpool'), on_one_core=True)},
    'cartpole_jax': {
        **{f'cartpole_{num_envs}': Case(
            f'PPO gymnax CartPole {num_envs:,} x {steps}, 4 epochs x 4',
            _gymnax('CartPole-v1', num_envs, steps), _GYMNAX_PEERS)
           for num_envs, steps in ((64, 128), (256, 128), (2048, 128), (16_384, 16))},
        'breakout_minatar': Case('PPO gymnax Breakout-MinAtar 256 x 128, MLP, 4 epochs x 4',
                                 _gymnax('Breakout-MinAtar', 256, 128), _GYMNAX_PEERS)},
    'cartpole_seeds': {'cartpole_seeds': Case(
        f'PPO gymnax CartPole 64 x 128, {SEEDS} seeds in one program',
        _gymnax('CartPole-v1', 64, 128), ('scanned',), seeds=SEEDS)},
    'cheetah_replay': {
        'cheetah_sac': Case(
            'SAC HalfCheetah 8 x 4, 32 gradient steps', _off_policy('sac_mujoco'), _STABLE_PEERS),
        'cheetah_sac_1': Case(
            'SAC HalfCheetah 1 x 1, 1 gradient step',
            _off_policy('sac_mujoco', *_ONE_STEP), _STABLE_PEERS),
        'cheetah_sac_32': Case(
            'SAC HalfCheetah 32 x 1, 32 gradient steps',
            _off_policy('sac_mujoco', *_WIDE), _STABLE_PEERS),
        'cheetah_td3': Case(
            'TD3 HalfCheetah 8 x 4, 32 gradient steps', _off_policy('td3_mujoco'), _STABLE_PEERS),
        'cheetah_td3_1': Case(
            'TD3 HalfCheetah 1 x 1, 1 gradient step', _off_policy('td3_mujoco', *_ONE_STEP),
            _STABLE_PEERS),
        'cheetah_td3_32': Case(
            'TD3 HalfCheetah 32 x 1, 32 gradient steps', _off_policy('td3_mujoco', *_WIDE),
            _STABLE_PEERS)},
    'cartpole_gymnasium': {'cartpole_gymnasium': Case(
        'PPO Gymnasium CartPole 16 x 128, 4 epochs x 4',
        [*_CARTPOLE, '--config.env.task=gymnasium:CartPole-v1', '--config.env.num_envs=16',
         '--config.unroll_length=128', '--config.scheme=sync'], ('sb3', 'sb3_subproc'))},
}
DEFAULT = [name for name in TASKS if name != 'cartpole_gymnasium']
CASES = {name: case for cases in TASKS.values() for name, case in cases.items()}


class Measurement(NamedTuple):
  """One process to measure.

  Attributes:
    case: name of the case.
    program: OURS or the name of a peer.
    cores: number of cores that it may use.
    run: 1, 2, ...; 0 for a trial that chooses the number of threads.
    threads: PyTorch's threads of a trial; 0: those that the trials chose, or none.
  """

  case: str
  program: str
  cores: int
  run: int
  threads: int = 0


def thread_counts(cores: int) -> list[int]:
  """Returns the numbers of PyTorch's threads that are tried."""
  return sorted({1, min(2, cores), cores})


def plan(tasks: Sequence[str], peers: Sequence[str], cores: int, runs: int) -> list[Measurement]:
  """Returns all measurements in their order.

  Programs of a case follow each other, and every second run has the opposite order. The runs of all
  cases come before the next run of any, so an early end leaves something of each.

  Args:
    tasks: names of TASKS.
    peers: names of PEERS.
    cores: number of cores that the command may use.
    runs: runs of each program.
  """
  groups = []  # (case, cores, programs)
  for task in tasks:
    for name, case in TASKS[task].items():
      programs = [OURS, *(peer for peer in case.peers if peer in peers)]
      groups.append((name, cores, programs))
      if case.on_one_core and cores > 1:
        groups.append((name, 1, programs))
  trials = [Measurement(case, program, width, 0, threads)
            for case, width, programs in groups for program in programs
            if program != OURS and PEERS[program].has_torch and width > 1
            for threads in thread_counts(width)]
  return trials + [
      Measurement(case, program, width, run)
      for run in range(1, runs + 1) for case, width, programs in groups
      for program in (programs if run % 2 else reversed(programs))]


def command(measurement: Measurement, folder: Path, python: str, checkout: Path | None
            ) -> list[str]:
  """Returns the command of a measurement.

  Args:
    measurement: what is measured.
    folder: of this process; a peer reads `config.json` and writes `metrics.jsonl`.
    python: the interpreter of the peer's virtual environment.
    checkout: of the peer, if it needs one.
  """
  case = CASES[measurement.case]
  if measurement.program == OURS:
    seeds = [f'--num_seeds={case.seeds}'] if case.seeds else []
    return [sys.executable, '-m', 'podracer_jit', *case.flags, f'--config.total_steps={STEPS}',
            '--config.placement.adapt=False', f'--workdir={folder / "workdir"}', *seeds]
  peer = PEERS[measurement.program]
  program = ([str(PROGRAMS / peer.program)] if peer.venv else
             ['-m', f'benchmarks.peers.programs.{peer.program.removesuffix(".py")}'])
  seeds = [str(case.seeds)] if case.seeds else []
  return [python, *program, str(folder / 'config.json'), str(folder / 'metrics.jsonl'),
          *peer.arguments, *([str(checkout)] if checkout else []), *seeds]


def metrics_file(measurement: Measurement, folder: Path) -> tuple[Path, int]:
  """Returns the file that gets a line for each update, and the trainings that each line is of."""
  seeds = CASES[measurement.case].seeds
  if measurement.program != OURS:
    return folder / 'metrics.jsonl', 1
  workdir = folder / 'workdir'
  # The seeds train in step, so those of the first one tell.
  return (workdir / 'seed1' / 'metrics.jsonl', seeds) if seeds else (workdir / 'metrics.jsonl', 1)


def cores_of(measurement: Measurement) -> set[int]:
  """Returns the cores that a process may use, the last ones of this process."""
  return set(sorted(os.sched_getaffinity(0))[-measurement.cores:])
