"""How many members a machine trains at once."""

import json
import os
import time

import pytest

from podracer_jit.sweep import fitting
from podracer_jit.sweep.fitting import Size
from podracer_jit.sweep.local import Local, Slot, log_of, slots_of
from podracer_jit.sweep.members import Member

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


# A config that tells how the process of its member was started.
TELLS = """
import json, os, sys
print(json.dumps([sorted(os.sched_getaffinity(0)),
                  {name: value for name, value in os.environ.items()
                   if name.startswith(('XLA_CLIENT', 'XLA_PYTHON', 'CUDA_VISIBLE'))}]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize('slots, variables, expected', [
    ((None, None), {}, ({}, {})),
    ((0, 1), {}, ({'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'})),
    ((0, 0), {}, ({'CUDA_VISIBLE_DEVICES': '0', 'XLA_CLIENT_MEM_FRACTION': '0.450'},) * 2),
    ((1, 1), {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'CUDA_VISIBLE_DEVICES': '4,6'},
     ({'CUDA_VISIBLE_DEVICES': '6', 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'},) * 2)])
def test_each_process_has_its_part_of_the_machine(tmp_path, monkeypatch, slots, variables,
                                                  expected):
  for name in [*os.environ]:
    if name.startswith(('XLA_CLIENT', 'XLA_PYTHON', 'CUDA_VISIBLE')):
      monkeypatch.delenv(name)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  (tmp_path / 'tells.py').write_text(TELLS)
  all_cpus = sorted(os.sched_getaffinity(0))
  cpus = [all_cpus[:1], all_cpus[-1:]]
  jobs = Local(tmp_path, [Slot(tuple(each), gpu)
                          for each, gpu in zip(cpus, slots, strict=True)])
  members = [Member(name, str(tmp_path / 'tells.py'), {'seed': 1}) for name in 'ab']
  for member in members:
    jobs.begin(member)
  assert not jobs.has_room
  while jobs.running:
    assert all(code == 0 for _, code in jobs.ended())
    time.sleep(0.1)
  assert [json.loads(log_of(tmp_path, member).read_text()) for member in members] == [
      [*each] for each in zip(cpus, expected, strict=True)]
