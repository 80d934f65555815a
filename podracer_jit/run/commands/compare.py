"""Says whether two runs are the same to the last bit, and if not, where they first differ.

  podracer_jit compare runs/a runs/b
  podracer_jit compare --deep runs/a runs/b

It reads the receipts of both runs, which have a fingerprint of every update's batch and parameters,
and then prints the two learning curves side by side. With --deep it makes the first differing
update of both runs again, each where the run made it, and says which array differs first (a leaf of
the rollout, of a gradient, of the optimizer's state or of the parameters) and by how many units in
the last place. That needs the checkpoint before the update's segment.

Exit code: 0 if all updates that both have are identical, 1 if some differ, 2 if there is nothing to
compare.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from podracer_jit.run import checkpoint

ROWS = 10  # of the learning curves


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  if set(argv[1:]) & {'-h', '--help'}:
    print(__doc__)
    return 0
  wants_deep, args = '--deep' in argv, [arg for arg in argv[1:] if arg != '--deep']
  if len(args) != 2 or any(arg.startswith('-') for arg in args):
    print('podracer_jit compare: two workdirs are needed: podracer_jit compare runs/a runs/b',
          file=sys.stderr)
    return 2
  workdirs = [Path(arg) for arg in args]
  try:
    configs = [checkpoint.read_config(workdir) for workdir in workdirs]
    headers, receipts = zip(*map(checkpoint.read_receipts, workdirs), strict=True)
    curves = [checkpoint.read_lines(workdir / 'metrics.jsonl') for workdir in workdirs]
    if not receipts[0].keys() & receipts[1].keys():
      raise ValueError('the runs have no update in common')
  except (ValueError, OSError) as error:
    print(f'podracer_jit compare: {error}', file=sys.stderr)
    return 2
  verdict, different = compare(*receipts)
  try:
    for line in [*config_differences(*configs), *header_differences(*headers)]:
      print(line)
    print(verdict)
    if wants_deep and different is not None:
      sys.stdout.flush()
      from podracer_jit.run import deep  # here, since reading receipts need not load NumPy
      print(*deep.differences(workdirs, different), sep='\n')
    print_curves(*curves)
    sys.stdout.flush()
  except ValueError as error:
    print(f'podracer_jit compare: {error}', file=sys.stderr)
    return 2
  except BrokenPipeError:  # as in `podracer_jit compare a b | head`
    print(f'podracer_jit compare: its output was cut; {verdict}', file=sys.stderr)
    raise
  return 0 if different is None else 1


def config_differences(one: dict, two: dict) -> list[str]:
  """A line for each field of the experiment that differs; placement and logs do not count."""
  return [f'config: {line}' for line in checkpoint.differences(one, two, ('in A', 'in B'))]


def header_differences(one: Sequence[dict], two: Sequence[dict]) -> list[str]:
  """What else may be to blame: arithmetic, versions, where segments began."""
  found = []
  for a, b in zip(one, two, strict=False):
    where = f'segment {a["segment"]}: '
    if a.get('canary') != b.get('canary'):
      found.append(f'{where}different arithmetic: the same gradient has the fingerprint '
                   f'{a.get("canary")} in A and {b.get("canary")} in B')
    found += [f'{where}{name} was {a["versions"].get(name)} in A and {b["versions"].get(name)} in B'
              for name in sorted(a['versions'].keys() | b['versions'].keys())
              if a['versions'].get(name) != b['versions'].get(name)]
    if a['first_update'] != b['first_update']:
      found.append(f'{where}begins with update {a["first_update"]} in A and '
                   f'{b["first_update"]} in B: other episodes from there on')
      break
  return found


def compare(one: dict[int, dict], two: dict[int, dict]) -> tuple[str, int | None]:
  """The verdict in words, and the first update that differs, if one does."""
  common = sorted(one.keys() & two.keys())
  for update in common:
    differ = [name for name in ('batch', 'params') if one[update][name] != two[update][name]]
    if differ:
      what = {('batch', 'params'): 'the batch differs first, that is what the actors made (and so '
                                   'the parameters learned from it)',
              ('params',): 'the batch is the same and the parameters differ: it is the learner',
              ('batch',): 'the batch differs; the parameters do not'}[tuple(differ)]
      values = ', '.join(f'{name} {one[update][name]} in A, {two[update][name]} in B'
                         for name in differ)
      return f'differ at update {update}: {what}\n  {values}', update
  longest = max(max(one), max(two))
  rest = '' if len(common) == len(one) == len(two) else \
      f'; A has {len(one)} and B {len(two)}, up to update {longest}'
  return f'identical: {len(common)} updates, batches and parameters{rest}', None


def print_curves(one: Sequence[dict], two: Sequence[dict]) -> None:
  """Mean returns side by side, at the updates that both have."""
  by_update = {x['update']: x for x in two}
  both = [(x, by_update[x['update']]) for x in one if x['update'] in by_update]
  step = max(1, -(-len(both) // ROWS))
  print(f'{"update":>8} {"steps":>12} {"return A":>10} {"return B":>10}')
  for a, b in both[::-1][::step][::-1]:
    values = (f'{"-" if x is None else f"{x:.2f}":>10}'
              for x in (a['episode_return'], b['episode_return']))
    print(f'{a["update"]:>8} {a["steps"]:>12,}', *values)
