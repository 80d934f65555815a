"""Flags for the placements of Cleanba's figures, by the names that they have there.

python examples/cleanba_names.py a0_l1,2,3_d2

In `a0_l1,2,3_d2`, device 0 acts, devices 1, 2 and 3 learn, and two processes do so. The flags are
for configs with 128 environments, such as `impala_atari`: each process has two shards for each
device that acts, and one group of gradients for each that learns. A number of environments that
these do not divide is lowered, as in the paper (120 for three learners).
"""

import math
import re
import sys

ENVIRONMENTS = 128
MINIBATCHES = 4  # of the configs; each takes as many environments of a group


def flags(name: str) -> list[str]:
  """Returns the flags of a placement.

  Args:
    name: such as a0_l1,2,3 or a0+1_l2+3_d2.

  Raises:
    ValueError: it is no such name.
  """
  match = re.fullmatch(r'a(\d+(?:[,+]\d+)*)_l(\d+(?:[,+]\d+)*)(?:_d([1-9]\d*))?', name)
  if not match:
    raise ValueError(f'a placement has a name such as a0_l1,2,3 or a0+1_l2+3_d2, got {name!r}')
  actors, learners = (re.split('[,+]', ids) for ids in match.group(1, 2))
  processes = int(match[3] or 1)
  shards = 2 * len(actors) * processes
  groups = len(learners) * processes
  unit = math.lcm(shards, groups * MINIBATCHES)
  return [f'--config.placement.actor_devices={",".join(actors)},',
          f'--config.placement.learner_devices={",".join(learners)},',
          f'--config.num_shards={shards}', f'--config.num_grad_shards={groups}',
          f'--config.env.num_envs={max(1, ENVIRONMENTS // unit) * unit}',
          *(['--distributed'] if processes > 1 else [])]


if __name__ == '__main__':
  try:
    print(' '.join(flags(*sys.argv[1:])))
  except (TypeError, ValueError) as error:
    sys.exit(f'{error}\n{__doc__}')
