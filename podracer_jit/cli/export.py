"""Writes the agent of a checkpoint to a new folder, for programs that do not have this package.

  podracer_jit export --workdir=runs/pong --out=pong
  podracer_jit export --workdir=runs/pong --out=pong --update=best

The folder has the parameters (parameters.safetensors), two programs of jax.export that choose
actions (greedy.jax, drawn.jax), a description of them (agent.json), the config, and checksums
(manifest.json). The programs run on CPUs, NVIDIA's GPUs and TPUs, with any batch. Nothing is
pickled. examples/load_exported.py plays with such a folder; podracer_jit.load reads it, too.

If the config of the run names modules of its own, it needs --allow_modules=mine, as it runs them.

Exit code: 0, 1 if writing failed, 2 if it could not start, or the network cannot be exported.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from absl import flags

from podracer_jit.experiment import modules
from podracer_jit.options import shorten
from podracer_jit.parts import user_path
from podracer_jit.play import agent as agent_lib
from podracer_jit.play import evaluation, export
from podracer_jit.runtime import host
from podracer_jit.runtime.output import complain
from podracer_jit.training import evaluator


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  warnings.filterwarnings('ignore', module='gymnasium')  # about bounds that we do not use
  values = _flags()
  try:
    arguments = values(list(argv))
    if values.help:
      print(f'{__doc__}\n{values.get_help()}')
      return 0
    if arguments[1:]:
      raise ValueError(f'{arguments[1]}: not a flag; flags begin with --')
    if not (values.workdir and values.out):
      raise ValueError('--workdir and --out are needed: podracer_jit export --workdir=runs/pong '
                       '--out=pong')
    workdir = user_path(values.workdir)
    out = user_path(values.out)
    agent_lib.check_new(out)
    allowed = modules.allowed(values.allow_modules)
    update = evaluator.chosen_update(values.update, workdir)
    experiment = evaluation.read_experiment(workdir, allowed, update)
    host.prepare_host(experiment.placement)
    agent = agent_lib.Agent(experiment, evaluation.restore(workdir, experiment, update))
    note = evaluation.broken_note(workdir, agent.update) if update is None else ''
    if note:
      complain(f'podracer_jit export: {note}')
    agent.export(out)
  except OSError as error:
    complain(f'podracer_jit export: cannot write {values.out}: {" ".join(str(error).split())}')
    return 1
  except (ValueError, flags.Error) as error:
    complain(f'podracer_jit export: {" ".join(str(error).split())}')
    return 2
  size = sum(path.stat().st_size for path in out.rglob('*') if path.is_file())
  print(f'{out}: the agent of {shorten(agent.task)} after update {agent.update:,} '
        f'({agent.steps:,} steps), {size:,} bytes; {export.DESCRIPTION} says how it is called')
  return 0


def _flags() -> flags.FlagValues:
  """Defines the flags apart from absl's global ones, which belong to the importing program."""
  values = flags.FlagValues()
  text = dict(flag_values=values)
  flags.DEFINE_string('workdir', None, 'The workdir of the run.', **text)
  flags.DEFINE_string('out', None, 'The folder to write, which must not exist yet.', **text)
  flags.DEFINE_string('update', None, 'The checkpoint: a number, or best, the one with the best '
                      'evaluation while the run trained. Default: the newest whole one.', **text)
  flags.DEFINE_list('allow_modules', [], modules.HELP, **text)
  flags.DEFINE_bool('help', False, 'Show this.', short_name='h', **text)
  return values
