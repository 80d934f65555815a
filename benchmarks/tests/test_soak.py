"""The soak: what grows is found in samples written by hand, and a short real run is flat."""

import json
import os

import pytest

from benchmarks import soak
from benchmarks.soak import Sample
from benchmarks.tests.run import run_benchmark

EVERY = 10  # updates of a segment


def samples(count=100, **growth):
  """Returns a sample for each segment, of a second each; fields grow by so much a segment."""
  flat = Sample(0.0, 0, 500 * 2**20, 300 * 2**20, 2**20, 2**20, 200 * 2**20, 30, 8, 1000)
  return [flat._replace(seconds=float(n), update=EVERY * n, **{
      name: getattr(flat, name) + int(step * n) for name, step in growth.items()})
          for n in range(count)]


def problems(run):
  return soak.problems(run, EVERY, max_growth_kb=100, max_slowdown=2)


@pytest.mark.parametrize('growth, words', [
    (dict(), ''), (dict(rss=90 * 1024), ''), (dict(rss=110 * 1024), 'memory grows by 110 KB'),
    (dict(threads=0.5), 'threads grow: by 12'), (dict(fds=1), 'fds grow: by 25'),
    (dict(mappings=5), 'mappings grow: by 125'), (dict(threads=0.05), '')])
def test_what_grows_is_told(growth, words):
  lines = problems(samples(**growth))
  assert words in ' '.join(lines) and bool(words) == bool(lines)


def test_a_few_segments_say_nothing():
  assert 'made 4.0 segments; 10 are needed' in problems(samples(5))[0]


def test_threads_that_come_and_go_do_not_grow():
  run = [sample._replace(threads=20 + n % 3 * 10) for n, sample in enumerate(samples())]
  assert problems(run) == []


def test_a_segment_that_takes_longer_and_longer_is_told():
  run = [sample._replace(seconds=(sample.seconds / 10)**2) for sample in samples()]
  first, last = soak.segment_seconds(run, EVERY)
  assert last > 5 * first
  assert 'a segment takes' in problems(run)[0]
  assert soak.segment_seconds(samples(), EVERY) == pytest.approx((1.0, 1.0))


def test_the_slope_is_that_of_the_second_half():
  run = samples(rss=1000)
  run = [sample._replace(rss=10**9) for sample in run[:40]] + run[40:]
  assert soak.slope(run, 'rss', EVERY) == pytest.approx(1000)
  assert soak.slope(run[:1], 'rss', EVERY) == 0


SMAPS = """\
55d0-55d1 rw-p 00000000 00:00 0                          [heap]
Size:                  8 kB
Anonymous:             6 kB
VmFlags: rd wr mr mw me ac
7f00-7f01 r-xp 00000000 00:00 0
Anonymous:             4 kB
7f02-7f03 r-xp 00000000 fe:00 1234                       /usr/lib/libc.so.6
Anonymous:             1 kB
7f04-7f05 rw-p 00000000 00:00 0
Anonymous:            16 kB
"""


def test_mappings_are_told_apart():
  assert soak.read_mappings(SMAPS) == (6 * 1024, 4 * 1024, 4)
  assert soak.read_fields('Name:\tpython\nVmRSS:\t  12 kB\nThreads:\t3\n') == dict(
      VmRSS=12, Threads=3)


def test_this_process_can_be_read():
  sample = soak.read_sample(os.getpid(), 1.0, 2)
  assert sample.rss == sample.anonymous + sample.files and sample.files > 0
  assert 0 < sample.heap < sample.anonymous
  assert sample.threads >= 1 and sample.fds >= 3 and sample.mappings > 10


def test_the_last_whole_line_has_the_update(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  assert soak.read_update(path) == 0
  path.write_text('{"update": 1}\n{"update": 2}\n{"upda')
  assert soak.read_update(path) == 2
  path.write_text(''.join(f'{{"update": {n}}}\n' for n in range(2000)))
  assert soak.read_update(path) == 1999


def test_threads_and_open_files_of_a_real_training_are_flat(tmp_path):
  """Twenty segments; times are not asserted, since others use the machine too."""
  path = tmp_path / 'samples.json'
  process = run_benchmark('soak', '--segments=20', '--every_updates=10', '--interval_s=0.1',
                       '--max_slowdown=100', '--max_growth_kb=20000', f'--json={path}',
                       '--config.env.num_envs=8', '--config.unroll_length=5')
  assert process.returncode == 0, process.stdout + process.stderr
  assert 'memory, threads and open files are bounded' in process.stdout
  run = [Sample(**row) for row in json.loads(path.read_text())]
  assert run[-1].update >= 200 and run[-1].rss > 50 * 2**20
  for name in ('threads', 'fds'):
    assert abs(soak.count_growth(run, name)) <= soak.SLACK[name]


def test_a_training_that_cannot_start_is_told():
  process = run_benchmark('soak', '--segments=1', '--interval_s=0.1', '--config.scheme=sink')
  assert process.returncode == 1
  assert 'WRONG: the training ended with exit code 2' in process.stdout and 'sink' in process.stdout


def test_unknown_flags_are_refused(capsys):
  assert soak.main(['--segmants=1']) == 2
  assert '--segmants=1' in capsys.readouterr().err
