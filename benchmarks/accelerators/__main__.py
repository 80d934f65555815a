"""Counts the kernels that trainings launch on an H100, on a machine without one.

  scripts/test --accelerators     makes the environment .venv-accelerators, and tests there
  .venv-accelerators/bin/python -m benchmarks.accelerators

Compiles the rollout and the update of shipped configs for one H100, and prints a table in Markdown:
the kernels of a step of all environments, and of an update. At the sizes of reinforcement learning
a GPU's speed follows from their number. Kernels are not chosen by time, since nothing runs.

Exit code: 0, or 2 if the compilers are missing or a config is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.accelerators import chips

CONFIGS = ('impala_atari:nature_cnn', 'impala_atari', 'ppo_mujoco', 'ppo_cartpole',
           'apex_dqn_atari')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit code."""
  own = argparse.ArgumentParser(
      prog='python -m benchmarks.accelerators', description=__doc__, allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter)
  own.add_argument('--configs', default=','.join(CONFIGS), help='shipped configs, by commas')
  args = own.parse_args(argv)
  if not chips.are_known():
    print('accelerators: the compilers are missing; scripts/test --accelerators installs them',
          file=sys.stderr)
    return 2
  chips.prepare()
  from benchmarks.accelerators import programs  # noqa: PLC0415 - after the compilers' settings
  print('| config | kernels of a step | of an update | seconds of compilation |')
  print('| --- | --- | --- | --- |')
  for name in args.configs.split(','):
    try:
      config = programs.shipped(name)
    except ValueError as error:
      print(f'accelerators: {error}', file=sys.stderr)
      return 2
    since = time.monotonic()
    of_step, of_update = programs.launches_of(config, chips.devices('cuda', 1))
    seconds = time.monotonic() - since
    print(f'| `{name}` | {of_step:,.1f} | {of_update:,.0f} | {seconds:.0f} |', flush=True)
  return 0


if __name__ == '__main__':
  sys.exit(main())
