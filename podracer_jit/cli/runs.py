"""Flags that name a run or an agent, for several verbs."""

from __future__ import annotations

from absl import flags

from podracer_jit.experiment import modules
from podracer_jit.parts import user_path
from podracer_jit.play.agent import Agent, load_run
from podracer_jit.runtime.output import complain
from podracer_jit.training import evaluator


def run_flags() -> flags.FlagValues:
  """Defines flags that name a run; absl's global flags belong to the importing program."""
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'The workdir of the run.', flag_values=values)
  flags.DEFINE_list('allow_modules', [], modules.HELP, flag_values=values)
  return values


def agent_flags() -> flags.FlagValues:
  """Defines flags that name a checkpoint of a run, for `agent_of`."""
  values = run_flags()
  flags.DEFINE_string('update', None, 'The checkpoint: its update, or best for the checkpoint with '
                      'the best evaluation during training. Default: the newest whole checkpoint.',
                      flag_values=values)
  return values


def agent_of(verb: str, values: flags.FlagValues) -> Agent:
  """Returns the agent that the flags of `agent_flags` name.

  Args:
    verb: the name of the verb, for a line about newer checkpoints that are broken.
    values: the flags.

  Raises:
    ValueError: there is no such run or checkpoint.
  """
  workdir = user_path(values.workdir)
  update = evaluator.chosen_update(values.update, workdir)
  allowed = modules.allowed(values.allow_modules)
  agent, note = load_run(workdir, update, allow_modules=allowed)
  if note:
    complain(f'podracer_jit {verb}: {note}')
  return agent
