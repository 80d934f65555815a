"""Which cases of a test are in `scripts/test`; the others are in `scripts/test --all` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def essential(cases: Iterable[Any], *chosen: Any) -> list[Any]:
  """Returns the cases of a `parametrize`; all but the chosen ones are marked `full`.

  Args:
    cases: values, or tuples of values.
    *chosen: some of them. Of tuples, the first value is enough.
  """
  def is_chosen(case):
    return case in chosen or isinstance(case, tuple) and case[0] in chosen

  def values(case):
    return case if isinstance(case, tuple) else (case,)

  cases = list(cases)
  assert sum(map(is_chosen, cases)) >= len(chosen), f'{chosen} are not all among {cases}'
  return [pytest.param(*values(case), marks=() if is_chosen(case) else pytest.mark.full)
          for case in cases]
