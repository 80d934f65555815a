"""Compares two runs bit by bit and shows their first difference.

  podracer_jit compare runs/a runs/b
  podracer_jit compare --deep runs/a runs/b

The command compares the receipts of both runs, which have a fingerprint of every update's batch and
parameters. It prints the fields in which the configs differ, changes of the config that only one
run made (--extend, --change), other runs that they began with (--init_from), files of your own
modules that differ or have changed on the way, and both learning curves side by side.

With --deep the command repeats the first differing update of both runs, each with its run's
placement. It prints the array that differs first (of the rollout, a gradient, the optimizer's state
or the parameters), and by how many units in the last place. It begins with the nearest checkpoint
before the update.

If the config of a run names modules of its own, --deep needs --allow_modules=mine, since it runs
them.

Exit code: 0 if all common updates are identical, 1 if some differ, 2 if there is nothing to
compare, or receipts are missing or garbled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from podracer_jit.cli import arguments, deep, verb
from podracer_jit.errors import Refused, refusing
from podracer_jit.experiment import modules
from podracer_jit.options import printable, shorten
from podracer_jit.parts import user_path
from podracer_jit.runtime.output import complain
from podracer_jit.workdir import checkpoints, journal, record, sources
from podracer_jit.workdir.workdir import Workdir

ROWS = 10  # of the learning curves
_CURVE = dict(update=int, steps=int, episode_return=float | None)  # of a line of metrics.jsonl


@verb
def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  values = flags.FlagValues()
  flags.DEFINE_bool('deep', False, 'Repeat the first update that differs.', flag_values=values)
  flags.DEFINE_list('allow_modules', [], modules.HELP, flag_values=values)
  args = arguments.read(argv, values, __doc__)
  if args is None:
    return 0
  if len(args) != 2:
    raise Refused('two workdirs are needed: podracer_jit compare runs/a runs/b')
  with refusing(OSError):
    folders = [user_path(arg) for arg in args]
    try:
      runs = [Workdir(folder) for folder in folders]
      configs = [run.shown_config() for run in runs]
    except ValueError as error:
      raise ValueError(str(error).removeprefix('--workdir: ')) from None
    kept = [sources.read(folder) for folder in folders]
    receipts = [journal.read_receipts(folder) for folder in folders]
    curves = [journal.read_lines(folder / journal.METRICS, _CURVE) for folder in folders]
    if not receipts[0].by_update.keys() & receipts[1].by_update.keys():
      raise ValueError('the runs have no update in common')
  verdict, different = compare(*(side.by_update for side in receipts))
  incomplete = [f'{name}: {folder / journal.RECEIPTS}: {problem}'
                for name, folder, side in zip('AB', folders, receipts, strict=True)
                for problem in [*side.problems, *_missing_at_the_end(folder, side)]]
  if incomplete and different is None:
    verdict = f'unknown, since receipts are missing; the existing receipts: {verdict}'
  try:
    for line in [*config_differences(*configs),
                 *record.differences_of_histories(*(run.record for run in runs)),
                 *sources.differences(*kept),
                 *header_differences(*(side.headers for side in receipts)), *incomplete]:
      print(printable(line))
    print(verdict)
    if values.deep and different is not None:
      sys.stdout.flush()
      with refusing():
        lines = deep.differences(folders, different, values.allow_modules)
      print(*map(printable, lines), sep='\n')
    print_curves(*curves)
    sys.stdout.flush()
  except BrokenPipeError:  # as in `podracer_jit compare a b | head`
    complain(f'podracer_jit compare: the output was cut; {verdict}')
    raise
  if different is not None:
    return 1
  return 2 if incomplete else 0


def _missing_at_the_end(workdir: Path, receipts: journal.Receipts) -> list[str]:
  """Returns a line if a checkpoint has an update after the last receipt."""
  last = max(receipts.by_update)
  saved = max(checkpoints.saved_updates(workdir), default=0)
  return [f'no line of {last + 1} to {saved}'] if saved > last else []


def config_differences(config_a: dict, config_b: dict) -> list[str]:
  """Returns a line for each different field; placement and logs do not count."""
  differences = record.differences(config_a, config_b, ('in A', 'in B'))
  return [f'config: {line}' for line in differences]


def header_differences(headers_a: Sequence[dict], headers_b: Sequence[dict]) -> list[str]:
  """Returns lines about other causes of a difference: rounding and versions.

  The newest header of each segment counts: a run has one more for each time that it has gone on.
  """
  lines = []
  by_segment = [{header['segment']: header for header in headers}
                for headers in (headers_a, headers_b)]
  for segment in sorted(by_segment[0].keys() & by_segment[1].keys()):
    a, b = (headers[segment] for headers in by_segment)
    where = f'segment {segment}: '
    if a.get('canary') != b.get('canary'):
      lines.append(f'{where}the machines round differently: the same gradient has the fingerprint '
                   f'{shorten(str(a.get("canary")))} in A and {shorten(str(b.get("canary")))} in B')
    flags = [str(header.get(journal.XLA_FLAGS, '')) for header in (a, b)]
    if flags[0] != flags[1]:
      lines.append(f'{where}XLA_FLAGS were {shorten(flags[0])!r} in A and {shorten(flags[1])!r} '
                   'in B')
    lines += [f'{where}{shorten(name)} was {shorten(str(was))} in A and {shorten(str(now))} in B'
              for name, was, now in _version_pairs(a, b) if was != now]
  return lines


def _version_pairs(a: dict, b: dict) -> list[tuple[str, Any, Any]]:
  """Returns the names of packages in either header of a segment, and both versions of each."""
  versions_a, versions_b = (
      header['versions'] if isinstance(header.get('versions'), dict) else {} for header in (a, b))
  return [(name, versions_a.get(name), versions_b.get(name))
          for name in sorted(versions_a.keys() | versions_b.keys())]


def compare(receipts_a: dict[int, dict], receipts_b: dict[int, dict]) -> tuple[str, int | None]:
  """Compares the receipts of two runs, by update.

  Returns:
    The verdict in words, and the first update that differs; None if there is none.
  """
  common = sorted(receipts_a.keys() & receipts_b.keys())
  for update in common:
    a = receipts_a[update]
    b = receipts_b[update]
    differ = [name for name in ('batch', 'params') if a[name] != b[name]]
    if differ:
      cause = {('batch', 'params'): "the actors' batch differs, and so do the parameters learned "
                                    'from it',
               ('params',): 'the batch is the same and the parameters differ: the cause is in the '
                            'learner',
               ('batch',): 'the batch differs; the parameters do not'}[tuple(differ)]
      values = ', '.join(f'{name} {shorten(a[name])} in A, {shorten(b[name])} in B'
                         for name in differ)
      return f'differ at update {update}: {cause}\n  {values}', update

  same_length = len(common) == len(receipts_a) == len(receipts_b)
  verdict = 'identical' if same_length else 'identical as far as both go'
  longer = [f'{name} goes on to update {max(receipts)}'
            for name, receipts in (('A', receipts_a), ('B', receipts_b))
            if max(receipts) > common[-1]]
  return '; '.join([f'{verdict}: {len(common)} updates, batches and parameters', *longer]), None


def print_curves(metrics_a: Sequence[dict], metrics_b: Sequence[dict]) -> None:
  """Prints the mean returns side by side, at updates that both runs have."""
  by_update = {record['update']: record for record in metrics_b}
  pairs = [(record, by_update[record['update']]) for record in metrics_a
           if record['update'] in by_update]
  step = max(1, -(-len(pairs) // ROWS))
  # Runs with other batches have other steps at the same update.
  same_steps = all(a['steps'] == b['steps'] for a, b in pairs)
  steps = ('steps',) if same_steps else ('steps A', 'steps B')
  print(f'{"update":>8}', *(f'{name:>12}' for name in steps), f'{"return A":>10} {"return B":>10}')
  # Counted from the end, so that the last update is among the rows.
  for a, b in pairs[::-1][::step][::-1]:
    values = (f'{"-" if x is None else f"{x:.2f}":>10}'
              for x in (a['episode_return'], b['episode_return']))
    print(f'{a["update"]:>8}', *(f'{x["steps"]:>12,}' for x in (a, b)[:len(steps)]), *values)
