"""How many members a machine trains at once."""

import pytest

from podracer_jit.sweep import fitting
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.local import Slot, slots_of

GB = 10**9


@pytest.mark.parametrize('jobs, cpus, gpus, slots', [
    (None, [0, 1], 0, [Slot((0,)), Slot((1,))]),
    (None, [3], 0, [Slot(())]),
    (1, [0, 1, 2, 3], 0, [Slot(())]),
    (2, [0, 1, 2, 3], 0, [Slot((0, 2)), Slot((1, 3))]),
    (3, [0, 1], 0, [Slot((0,)), Slot((1,)), Slot((0,))]),
    (None, [0, 1, 2, 3], 2, [Slot((0, 2), 0), Slot((1, 3), 1)]),
    (None, [0, 1], 1, [Slot(())]),
    (4, [0, 1, 2, 3], 2, [Slot((0,), 0), Slot((1,), 1), Slot((2,), 0), Slot((3,), 1)])])
def test_members_share_the_machine(jobs, cpus, gpus, slots):
  assert slots_of(jobs, cpus, gpus) == slots


@pytest.mark.parametrize('asked, slots, sizes, jobs', [
    (None, 2, [1, 1, 1], 2),
    (None, 8, [1, 1, 1], 3),  # no more than there are
    (None, 8, [3, 3, 3, 3, 3], 3),  # 10 GB hold three
    (None, 8, [8, 1, 1, 3], 1),  # the two largest may meet, and do not fit
    (None, 8, [20], 1),
    (None, 8, [], 1),
    (3, 2, [1, 1, 1], 3),  # more than cores, as asked
    (5, 8, [1, 1], 5)])
def test_as_many_as_the_memory_holds(monkeypatch, asked, slots, sizes, jobs):
  monkeypatch.setattr(fitting, 'host_memory', lambda: 10 * GB)
  assert fitting.jobs_that_fit(asked, slots, [Size(1, size * GB, 0) for size in sizes]) == jobs


def test_more_than_the_memory_holds_are_refused(monkeypatch):
  monkeypatch.setattr(fitting, 'host_memory', lambda: 10 * GB)
  with pytest.raises(ValueError, match='^--jobs: 4 members at once would need at least 12.0 GB, '
                     'and this machine has 10.0 GB; at most --jobs=3$'):
    fitting.jobs_that_fit(4, 2, [Size(1, 3 * GB, 0)] * 5)


def test_a_full_disk_is_seen_before_the_start(tmp_path):
  fitting.check_disk(tmp_path, [Size(1, 0, 1000)] * 3)
  with pytest.raises(ValueError, match='^--out: 2 members need at least 2000000.0 GB'):
    fitting.check_disk(tmp_path, [Size(1, 0, 10**15)] * 2)
