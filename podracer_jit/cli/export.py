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

from collections.abc import Sequence

from absl import flags

from podracer_jit.cli import arguments, runs, verb
from podracer_jit.errors import NotSaved, refusing
from podracer_jit.options import shorten
from podracer_jit.parts import user_path
from podracer_jit.play import agent as agent_lib
from podracer_jit.play import export


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = runs.agent_flags()
  flags.DEFINE_string('out', None, 'The folder to write, new or empty.',
                      flag_values=values)
  if not arguments.read_flags(argv, values, __doc__, ['workdir', 'out']):
    return 0
  out = user_path(values.out)
  with refusing():
    try:
      try:
        agent_lib.check_new(out)
      except ValueError as error:
        raise ValueError(f'--out: {error}') from None
      agent = runs.agent_of('export', values)
      agent.export(out)
    except OSError as error:
      raise NotSaved(f'--out: cannot write {values.out}: {error.strerror or error}') from error
  size = sum(path.stat().st_size for path in out.rglob('*') if path.is_file())
  print(f'{out}: the agent of {shorten(agent.task)} after update {agent.update:,} '
        f'({agent.steps:,} steps), {size:,} bytes; {export.DESCRIPTION} says how it is called')
  return 0
