"""How many actors on a Ray cluster can one learner serve? A model, and its check.

.venv/bin/python -m benchmarks.cluster_model          # measures this machine, checks, tells
.venv/bin/python -m benchmarks.cluster_model --skip   # with the figures of docs/machines.md

The model has four constants of the learner's machine: the processor time of a call and of a byte
that arrives, the round trip of an empty call, and the time that an actor needs to hand over a byte.
They are measured with small and with large results of one actor. The check predicts other sizes,
times and numbers of actors, and compares the predictions with measurements: real processes of Ray
on this machine, called as `impala` calls them. Then the model is asked about two papers.

Limits of the rollouts a second, where `fresh` is the part of rollouts that fetches parameters
which its machine does not have yet (with two calls under way, the round trip costs nothing):

  actors            actors / (rollout + bytes * hand-over + round trip)
  learner's calls   1 / (call + bytes * arrival)
  network, in       bandwidth / bytes
  network, out      bandwidth / (fresh * bytes of parameters)
"""

from __future__ import annotations

import argparse
import collections
import itertools
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from podracer_jit.cluster import set_ray_environment

MB = 1e6


class Machine(NamedTuple):
  """Constants of the learner's machine."""

  call_s: float  # processor time of the learner's process for a call
  arrival_s: float  # processor time for each byte of a result, copied once into the batch
  round_trip_s: float  # duration of an empty call
  hand_over_s: float  # time for each byte in the actor's process


class Load(NamedTuple):
  """An experiment."""

  actors: int
  rollout_s: float  # time for which an actor acts
  nbytes: float  # bytes of a rollout, or of a gradient
  params: float  # bytes of parameters
  fresh: float  # part of the rollouts that fetches parameters over the network
  two_calls: bool = True  # whether an actor has two calls under way


def limits(machine: Machine, load: Load, bandwidth: float) -> dict[str, float]:
  """Returns what each part allows, in rollouts a second.

  Args:
    machine: constants of the learner's machine.
    load: the experiment.
    bandwidth: bandwidth of the learner's network card, bytes a second in each direction.
  """
  period = load.rollout_s + load.nbytes * machine.hand_over_s
  if not load.two_calls:
    period += machine.round_trip_s
  return {
      'actors': load.actors / period if period else np.inf,
      "learner's calls": 1 / (machine.call_s + load.nbytes * machine.arrival_s),
      'network, in': bandwidth / load.nbytes,
      'network, out': bandwidth / (load.fresh * load.params) if load.fresh else np.inf,
  }


def serve(team: Sequence[Any], params: Any, load: Load, seconds: float, windows: int = 6
          ) -> tuple[float, float]:
  """Lets actors make results for a while, with a thread each, as the actors of a run have.

  Args:
    team: `Remote`s of a `Maker`.
    params: reference to parameters.
    load: the work of the actors.
    seconds: duration of the measurement.
    windows: parts of that time; the best one counts, as other programs disturb the others. If all
      pass without a result, more follow.

  Returns:
    Results a second, and the processor time of this process for each.
  """
  device = jax.local_devices()[0]
  counts = [0] * load.actors
  over = threading.Event()

  def act(i: int) -> None:
    calls: collections.deque = collections.deque()
    while not over.is_set():
      while len(calls) < 1 + load.two_calls:
        calls.append(team[i].submit('make', load.rollout_s, int(load.nbytes), params))
      value = team[i].wait(calls.popleft(), lambda: False).value
      # The learner copies results side by side into a batch.
      jax.device_put(value.copy(), device).block_until_ready()
      counts[i] += 1
    for call in calls:
      team[i].wait(call, lambda: False)

  threads = [threading.Thread(target=act, args=(i,)) for i in range(load.actors)]
  for thread in threads:
    thread.start()
  time.sleep(0.5)
  rates = [0.0]
  cpus = []
  for window in itertools.count():
    # On a busy machine, even the last window may end before the first result.
    if window >= windows and (cpus or not all(thread.is_alive() for thread in threads)):
      break
    before = sum(counts)
    start = time.perf_counter()
    start_cpu = time.process_time()
    time.sleep(seconds / windows)
    results = sum(counts) - before
    if results:
      rates.append(results / (time.perf_counter() - start))
      cpus.append((time.process_time() - start_cpu) / results)
  over.set()
  for thread in threads:
    thread.join()
  return max(rates), min(cpus, default=0.0)


def calibrate(team: Sequence[Any], params: Any, seconds: float) -> Machine:
  """Measures the constants with one actor."""
  small = Load(1, 0.0, 1000, 0, 0, two_calls=False)
  large = small._replace(nbytes=16 * MB)
  rates, cpus = zip(*[serve(team, params, load, seconds) for load in (small, large)],
                    strict=True)
  arrival_s = (cpus[1] - cpus[0]) / (large.nbytes - small.nbytes)
  per_byte_s = (1 / rates[1] - 1 / rates[0]) / (large.nbytes - small.nbytes)
  return Machine(cpus[0], arrival_s, 1 / rates[0], max(per_byte_s - arrival_s, 0.0))


def predict(machine: Machine, load: Load, cores: int) -> float:
  """Returns the rollouts a second on one machine, whose cores actors and learner share."""
  # Of a round trip, the processor works all the time: here, in Ray's daemons, or in the actor.
  busy_s = machine.round_trip_s + load.nbytes * (machine.arrival_s + machine.hand_over_s)
  slowest = min(limits(machine, load, np.inf).values())
  if not load.two_calls:
    # A call after the other: an actor waits while its result is copied into the batch.
    slowest = min(slowest, load.actors / (
        load.rollout_s + machine.round_trip_s + load.nbytes * (
            machine.hand_over_s + machine.arrival_s)))
  return min(slowest, cores / busy_s)


CHECKS = (
    Load(1, 0.0, 0.3 * MB, 0, 0, two_calls=False),
    Load(1, 0.0, 4 * MB, 0, 0, two_calls=False),
    Load(1, 0.02, 4 * MB, 0, 0, two_calls=False),
    Load(1, 0.02, 4 * MB, 0, 0),
    Load(2, 0.02, 1 * MB, 0, 0, two_calls=False),
    Load(2, 0.02, 1 * MB, 0, 0),
    Load(2, 0.05, 22 * MB, 0, 0),
    Load(8, 0.1, 0.3 * MB, 0, 0),
)


def check(team: Sequence[Any], params: Any, machine: Machine, cores: int, seconds: float
          ) -> list[float]:
  """Prints predictions and measurements.

  Args:
    team: `Remote`s of a `Maker`.
    params: reference to parameters.
    machine: constants of this machine.
    cores: cores that actors and learner share.
    seconds: duration of each measurement.

  Returns:
    The ratio of measurement and prediction of each load.
  """
  print(f'{"actors":>6}{"acting":>10}{"result":>10}{"calls":>7}{"predicted":>11}{"measured":>10}'
        f'{"ratio":>7}')
  ratios = []
  for load in CHECKS:
    expected = predict(machine, load, cores)
    measured, _ = serve(team, params, load, seconds)
    ratios.append(measured / expected)
    print(f'{load.actors:6}{1000 * load.rollout_s:7.0f} ms{load.nbytes / MB:7.1f} MB'
          f'{1 + load.two_calls:7}{expected:9.1f}/s{measured:8.1f}/s{ratios[-1]:7.2f}', flush=True)
  return ratios


# An observation of Atari: one new frame a step.
FRAME = 84 * 84
# Bytes of Nature CNN's parameters, and of Ape-X's dueling network, in float32.
NATURE = 4 * 1.69e6
DUELING = 4 * 3.3e6


def apex() -> Load:
  """Returns the load of Ape-X (1803.00933, section 4.1): 360 actors at 139 frames a second.

  An actor has one environment with 4 frames a step, sends 50 transitions at a time, and takes
  parameters every 400 frames, which are 2 rollouts of 50 steps. Here frames are not compressed.
  """
  steps = 50
  return Load(360, steps * 4 / 139, steps * (FRAME + 40), DUELING, fresh=0.5)


def nappo() -> Load:
  """Returns the load of 256 workers of NAPPO's `dppo_async`: each sends gradients of Nature CNN.

  A worker takes a gradient of 512 rows, at the 1,500 rows a second of docs/performance.md. Each
  gradient is answered by new parameters, so all of them are fetched.
  """
  return Load(256, 0.34, NATURE, NATURE, fresh=1.0, two_calls=False)


def tell(machine: Machine, name: str, load: Load, bandwidths: Sequence[float]) -> None:
  """Prints the limits of a load.

  Args:
    machine: constants of the learner's machine.
    name: the name of the load.
    load: an experiment.
    bandwidths: bandwidths of the learner's network card, bytes a second.
  """
  rate = limits(machine, load, np.inf)['actors']
  print(f'\n{name}: {load.actors} actors make {rate:,.0f} results a second of '
        f'{load.nbytes / MB:.2f} MB, {rate * load.nbytes / MB:,.0f} MB/s')
  for bandwidth in bandwidths:
    most = limits(machine, load, bandwidth)
    slowest = min(most, key=most.get)
    served = load.actors * min(1.0, min(most.values()) / rate)
    rest = ', '.join(f'{part} {limit:,.0f}/s' for part, limit in most.items() if part != 'actors')
    print(f'  {bandwidth * 8 / 1e9:5.0f} Gbit/s: serves {served:.0f} of them; first limit: '
          f'{slowest} ({rest})')


def main(argv: Sequence[str]) -> int:
  """Runs the model; returns 1 if a prediction is wrong by more than `--tolerance`."""
  parser = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--skip', action='store_true', help='measure nothing')
  parser.add_argument('--seconds', type=float, default=6.0, help='duration of each measurement')
  parser.add_argument('--tolerance', type=float, default=2.0,
                      help='largest ratio of a measurement and its prediction, or the inverse')
  args = parser.parse_args(argv[1:])
  code = 0
  machine = PUBLISHED
  if not args.skip:
    set_ray_environment()
    from podracer_jit.cluster import ray_cluster
    maker = Path(__file__).with_name('cluster_maker.py')
    actors = max(load.actors for load in CHECKS)
    with ray_cluster.connected(0.1, 0, 1, actors, int(2e9),
                               lambda folder: shutil.copy(maker, folder)) as cluster:
      cores = len(ray_cluster.os.sched_getaffinity(0))
      team = [cluster.remote(f'actor {i}', 'cluster_maker:Maker', lambda life: ())
              for i in range(actors)]
      params = cluster.publish(np.zeros(1000, np.uint8))
      for remote in team:
        remote.wait(remote.submit('make', 0.0, 10, params), lambda: False)
      machine = calibrate(team, params, args.seconds)
      ratios = check(team, params, machine, cores, args.seconds)
    print(f'median ratio {statistics.median(ratios):.2f}')
    code = int(any(max(ratio, 1 / ratio) > args.tolerance for ratio in ratios))
  print(f'\na call {1e6 * machine.call_s:.0f} us, arrival {1e9 * machine.arrival_s:.2f} ns/byte, '
        f'round trip {1e3 * machine.round_trip_s:.2f} ms, hand-over '
        f'{1e9 * machine.hand_over_s:.2f} ns/byte')
  bandwidths = [gigabits * 1e9 / 8 for gigabits in (1, 10, 100)]
  tell(machine, 'Ape-X', apex(), bandwidths)
  tell(machine, 'Ape-X, parameters every 40 rollouts', apex()._replace(fresh=1 / 40), bandwidths)
  tell(machine, 'Ape-X, 8 actors a machine that share what they fetch',
       apex()._replace(fresh=0.5 / 8), bandwidths)
  tell(machine, 'NAPPO', nappo(), bandwidths)
  tell(machine, 'NAPPO, 8 workers a machine that share what they fetch',
       nappo()._replace(fresh=1 / 8), bandwidths)
  return code


# Measured on two cores of an AMD EPYC, beside other work.
PUBLISHED = Machine(call_s=0.001021, arrival_s=0.27e-9, round_trip_s=0.00314, hand_over_s=0.62e-9)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
