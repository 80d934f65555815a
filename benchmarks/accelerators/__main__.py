"""Counts the kernels that trainings launch on an H100, on a machine without one.

  scripts/test --accelerators     makes the environment .venv-accelerators, and tests there
  .venv-accelerators/bin/python -m benchmarks.accelerators

Compiles the programs of shipped configs for one H100, and prints a table in Markdown: the kernels
of a step of all environments, of an update, of both in one program, of adding a rollout to a
replay, and of learning from one. At the sizes of reinforcement learning a GPU's speed follows from
their number. Kernels are not chosen by time, since nothing runs.

Exit code: 0, or 2 if the compilers are missing or a config is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.accelerators import chips

CONFIGS = ('impala_atari:nature_cnn', 'impala_atari', 'ppo_mujoco', 'ppo_cartpole',
           'ppo_cartpole gymnax:CartPole-v1', 'pqn_minatar', 'apex_dqn_atari', 'sac_mujoco')
COLUMNS = dict(step='kernels of a step', update='of an update', both='of a rollout and an update',
               insert='of adding a rollout', learn='of learning once')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  own = argparse.ArgumentParser(
      prog='python -m benchmarks.accelerators', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  own.add_argument('--configs', default=','.join(CONFIGS),
                   help='shipped configs, by commas; after a space a task, if not its own')
  args = own.parse_args(argv)
  if not chips.are_known():
    print('accelerators: the compilers are missing; scripts/test --accelerators installs them',
          file=sys.stderr)
    return 2
  chips.prepare()
  from benchmarks.accelerators import programs  # noqa: PLC0415 - after the compilers' settings
  print(f'| config | {" | ".join(COLUMNS.values())} | seconds of compilation |')
  print('| --- ' * (len(COLUMNS) + 2) + '|')
  for name in args.configs.split(','):
    try:
      config = programs.shipped(name)
    except ValueError as error:
      print(f'accelerators: {error}', file=sys.stderr)
      return 2
    since = time.monotonic()
    kernels = programs.launches_of(config, chips.devices('cuda', 1))
    cells = [f'{kernels[column]:,.0f}' if column in kernels else '' for column in COLUMNS]
    print(f'| `{name}` | {" | ".join(cells)} | {time.monotonic() - since:.0f} |', flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main())
