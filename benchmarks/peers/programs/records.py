"""Records of a training that is measured. Programs of all virtual environments import this file."""

import json
import sys
import time


class Records:
  """Writes a line for each update, as metrics.jsonl of podracer_jit has it."""

  def __init__(self, path):
    """Begins the clock; the file is new."""
    self._file = open(path, 'w')  # noqa: SIM115 - it is open until the process is ended
    self._start = time.perf_counter()
    self._updates = 0

  def write(self, steps):
    """Notes that an update is over, after this number of steps of the whole training."""
    self._updates += 1
    self._file.write(json.dumps(dict(update=self._updates, steps=int(steps),
                                     wall_s=time.perf_counter() - self._start)) + '\n')
    self._file.flush()


def arguments():
  """Returns the config of our side as a dict, the records, and the program's other arguments."""
  config_path, records_path, *rest = sys.argv[1:]
  with open(config_path) as file:
    return json.load(file), Records(records_path), rest
