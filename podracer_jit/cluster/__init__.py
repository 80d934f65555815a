"""Operations in processes on a Ray cluster: calls, new processes for dead ones, and figures."""

from __future__ import annotations

import os

_ENVIRONMENT = {
    # Ray would print paragraphs about dead processes and machines; `remote.Remote` says it in a
    # line.
    'RAY_DEDUP_LOGS_SKIP_REGEX':
        'A worker died or was killed|Raylet is terminated|has been marked dead',
    # The results of a call that has failed are not asked for.
    'RAY_IGNORE_UNHANDLED_ERRORS': '1',
    'RAY_USAGE_STATS_ENABLED': '0',
    # By default, Ray gives its processes a niceness of 15, so they get little of a busy processor.
    # A learner on the same machine that does not wait for them would have fewer steps than with
    # threads.
    'RAY_worker_niceness': '0'}


def set_ray_environment() -> None:
  """Sets what Ray reads from the environment, unless it is set; call it before Ray is imported."""
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
