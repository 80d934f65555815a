"""Lists the tasks that can be trained here: of EnvPool, gymnax, MuJoCo Playground and Gymnasium.

  podracer_jit envs               the families, each with its number of tasks
  podracer_jit envs atari         the tasks of a family
  podracer_jit envs mujoco        the tasks of families of this kind: mujoco.gym, mujoco.dmc, ...
  podracer_jit envs gymnax        environments that are JAX functions
  podracer_jit envs playground    MuJoCo Playground's tasks: JAX functions, and EnvPool's versions
  podracer_jit envs gymnasium     environments that Python steps
  podracer_jit envs breakout      the tasks with this in their names

The line of a task has its family, the shape and dtype of the network's observations, the actions,
and the part of the observations that masks them (env.action_mask). If a task cannot be trained on
this machine, the line has the reason. To train on a task, set --config.env.task=TASK.

Exit code: 0, or 2 if nothing matches.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence

from podracer_jit.agents import action_masks
from podracer_jit.cli import verb
from podracer_jit.envs import families
from podracer_jit.errors import Refused
from podracer_jit.experiment.schema import EnvOptions
from podracer_jit.options import defaults, printable

LONGEST_REASON = 80  # characters


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if set(argv[1:]) & {'-h', '--help'}:
    print(__doc__)
    return 0
  if len(argv) > 2 or any(arg.startswith('-') for arg in argv[1:]):
    raise Refused('one word is enough: podracer_jit envs atari')
  by_family = families.tasks()
  if not argv[1:]:
    for family, tasks in by_family.items():
      print(f'{family:20} {len(tasks):5} {"task" if len(tasks) == 1 else "tasks"}, '
            f'such as {tasks[0]}')
    return 0
  matches = matching(by_family, argv[1])
  if not matches:
    names = {name.lower(): name for family, tasks in by_family.items() for name in (family, *tasks)}
    near = difflib.get_close_matches(argv[1].lower(), names, n=1, cutoff=0.5)
    meant = f'; did you mean {names[near[0]]}?' if near else ''
    raise Refused(f'{argv[1]}: there is no such family or task{meant}')
  width = max(len(task) for task, _ in matches)
  for task, family in matches:
    print(printable(f'{task:{width}}  {family:18} {describe(task)}'), flush=True)
  return 0


def matching(by_family: Mapping[str, Sequence[str]], word: str) -> list[tuple[str, str]]:
  """Returns (task, family) of all tasks whose family the word names, or whose names contain it."""
  word = word.lower()
  named = [family for family in by_family if word in (family, *family.split('.'))]
  return [(task, family) for family, tasks in by_family.items() for task in tasks
          if (family in named if named else word in task.lower())]


def describe(task: str) -> str:
  """Returns a phrase about a task's observations and actions, or why it cannot be trained."""
  try:
    whole = families.family_of(task).make_spec(task, {})
  except Exception as error:  # noqa: BLE001 - a family raises whatever its library does
    return f'- {_reason(error, task)}'
  mask = ''
  try:
    spec = action_masks.find(whole, defaults(EnvOptions)['action_mask'], is_optional=True)
    if spec.action_mask:
      mask = f', masked by {spec.action_mask.name}'
  except ValueError:
    spec = whole
    mask = ", if env.action_mask is ''"
  spec = action_masks.seen(spec)
  if spec.num_actions:
    actions = f'{spec.num_actions} actions'
  elif spec.action_choices:
    actions = f'{_sizes(spec.action_choices)} choices'
  else:
    size = len(spec.action_low)
    actions = (f'{size} {"number" if size == 1 else "numbers"} from {min(spec.action_low):g} to '
               f'{max(spec.action_high):g}')
  shape = ' x '.join(map(str, spec.obs_shape))
  images = [f'{part.name} {" x ".join(map(str, part.shape))}'
            for part in spec.parts if part.is_image]
  inside = f' (image{"s" if len(images) > 1 else ""}: {", ".join(images)})' if images else ''
  return f'{shape} {spec.obs_dtype.name}{inside}  {actions}{mask}'


def _sizes(choices: Sequence[int]) -> str:
  """Returns the number of choices of each element, such as 4 x 3 x 10^2."""
  runs = [(size, len(list(run))) for size, run in itertools.groupby(choices)]
  return ' x '.join(f'{size}^{count}' if count > 1 else f'{size}' for size, count in runs)


def _reason(error: Exception, task: str) -> str:
  """Returns the first clause of an error, without the task's name."""
  text = ' '.join(str(error).split()) or type(error).__name__
  text = text.removeprefix('env.task: ').partition(';')[0].partition('. ')[0].rstrip('.')
  text = text.removeprefix(f'{task}: ').removeprefix(f'{task} ').replace(f' of {task}', '')
  return text if len(text) <= LONGEST_REASON else f'{text[:LONGEST_REASON - 3].rstrip()}...'
