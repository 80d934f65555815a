"""Stands in for an actor in `cluster_model`: computes for a time, and returns bytes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Maker:
  """Makes results of any size, in any time."""

  def make(self, seconds: float, nbytes: int, params: Any) -> tuple[int, np.ndarray]:
    """Returns a new array of so many bytes after so many seconds of work."""
    del params
    end = time.perf_counter() + seconds
    result = np.ones(nbytes, np.uint8)
    time.sleep(max(0.0, end - time.perf_counter()))
    return nbytes, result
