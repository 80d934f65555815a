"""The soak: it detects growth in hand-made samples, and a short real run does not grow."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Sample
from benchmarks.tests.run import run_benchmark

EVERY_UPDATES = 10


def samples(count=100, **growth):
  """Returns one sample a segment; a segment takes a second, and fields grow by `growth` in it."""
  flat = Sample(0.0, 0, 500 * 2**20, 300 * 2**20, 2**20, 2**20, 200 * 2**20, 30, 8, 1000)
  return [flat._replace(seconds=float(n), update=EVERY_UPDATES * n, **{
      name: getattr(flat, name) + int(step * n) for name, step in growth.items()})
          for n in range(count)]


def problems(run):
  return soak.problems(run, EVERY_UPDATES, max_growth_kb=100, max_slowdown=2)


@pytest.mark.parametrize('growth, message', [
    (dict(), ''), (dict(rss=90 * 1024), ''), (dict(rss=110 * 1024), 'memory grows by 110 KB'),
    (dict(threads=0.5), 'threads grow: by 12'), (dict(fds=1), 'fds grow: by 25'),
    (dict(mappings=5), 'mappings grow: by 125'), (dict(threads=0.05), '')])
def test_growth_is_reported(growth, message):
  lines = problems(samples(**growth))
  assert message in ' '.join(lines) and bool(message) == bool(lines)


def test_a_few_segments_are_not_enough():
  assert 'made 4.0 segments; 10 are needed' in problems(samples(5))[0]


def test_threads_that_come_and_go_do_not_grow():
  run = [sample._replace(threads=20 + n % 3 * 10) for n, sample in enumerate(samples())]
  assert problems(run) == []


def test_a_minimum_that_only_one_quarter_shows_is_no_growth():
  run = samples()
  run[60] = run[60]._replace(mappings=run[60].mappings - 100)
  assert problems(run) == []


def test_slower_and_slower_segments_are_reported():
  run = [sample._replace(seconds=(sample.seconds / 10)**2) for sample in samples()]
  first, last = soak.segment_seconds(run, EVERY_UPDATES)
  assert last > 5 * first
  assert 'a segment takes' in problems(run)[0]
  assert soak.segment_seconds(samples(), EVERY_UPDATES) == pytest.approx((1.0, 1.0))


def test_the_slope_is_taken_from_the_second_half():
  run = samples(rss=1000)
  run = [sample._replace(rss=10**9) for sample in run[:40]] + run[40:]
  assert soak.slope(run, 'rss', EVERY_UPDATES) == pytest.approx(1000)
  assert soak.slope(run[:1], 'rss', EVERY_UPDATES) == 0


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


def test_mappings_are_divided_into_heap_anonymous_and_files():
  assert soak.read_mappings(SMAPS) == (6 * 1024, 4 * 1024, 4)
  assert soak.read_fields('Name:\tpython\nVmRSS:\t  12 kB\nThreads:\t3\n') == dict(
      VmRSS=12, Threads=3)


def test_a_sample_of_this_process_is_plausible():
  sample = soak.read_sample(os.getpid(), 1.0, 2)
  assert sample.rss == sample.anonymous + sample.files and sample.files > 0
  assert 0 < sample.heap < sample.anonymous
  assert sample.threads >= 1 and sample.fds >= 3 and sample.mappings > 10


THREADS = f"""
import threading
from pathlib import Path

def work(name):
  Path(f'/proc/self/task/{{threading.get_native_id()}}/comm').write_text(name)
  named.wait()
  threading.Event().wait()

named = threading.Barrier(3)
for name in ('another', {soak.POOL_THREAD!r}):
  threading.Thread(target=work, args=(name,), daemon=True).start()
named.wait()
print('named', flush=True)
threading.Event().wait()
"""


def test_threads_of_tensorstores_pool_are_not_counted():
  process = subprocess.Popen([sys.executable, '-c', THREADS], stdout=subprocess.PIPE,
                             text=True)
  try:
    assert process.stdout.readline() == 'named\n'
    assert soak.count_threads(process.pid) == 2  # the main thread and one of two others
  finally:
    process.kill()
    process.communicate()


def test_the_update_is_read_from_the_last_complete_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  assert soak.read_update(path) == 0
  path.write_text('{"update": 1}\n{"update": 2}\n{"upda')
  assert soak.read_update(path) == 2
  path.write_text(''.join(f'{{"update": {n}}}\n' for n in range(2000)))
  assert soak.read_update(path) == 1999


UPDATES = """
import sys, time

time.sleep(float(sys.argv[1]))  # as if it compiled
with open('metrics.jsonl', 'w') as file:
  for update in (1, 2, 3):
    print(f'{{"update": {update}}}', file=file, flush=True)
    time.sleep(0.1)
time.sleep(60)
"""


@pytest.mark.parametrize('start_s, max_seconds, last', [(0.5, 60, 3), (60, 0.5, None)])
def test_samples_begin_with_the_first_update(start_s, max_seconds, last, tmp_path):
  """Until its programs are compiled, a training grows; that is no growth over its segments."""
  command = [sys.executable, '-c', UPDATES, str(start_s)]
  with subprocess.Popen(command, cwd=tmp_path) as process:
    run = soak.watch(process, tmp_path, max_seconds, max_updates=3, interval_s=0.02)
    process.kill()
  assert all(sample.update for sample in run)
  assert (run[-1].update if run else None) == last


@pytest.mark.full
def test_threads_and_open_files_of_a_real_training_are_flat(tmp_path):
  """The test asserts no times, since the machine may be shared."""
  path = tmp_path / 'samples.json'
  process = run_benchmark('soak', '--segments=20', '--every_updates=10', '--interval_s=0.1',
                          '--max_slowdown=100', f'--json={path}', '--config.env.num_envs=8',
                          '--config.unroll_length=5')
  assert process.returncode == 0, process.stdout + process.stderr
  assert 'memory, threads and open files are bounded' in process.stdout
  run = [Sample(**row) for row in json.loads(path.read_text())]
  assert run[-1].update >= 200 and run[-1].rss > 50 * 2**20
  for name in ('threads', 'fds'):
    assert soak.count_growth(run, name) <= soak.SLACK[name]


def test_a_training_that_cannot_start_is_reported():
  process = run_benchmark('soak', '--segments=1', '--interval_s=0.1', '--config.scheme=sink')
  assert process.returncode == 1
  assert 'WRONG: the training ended with exit code 2' in process.stdout and 'sink' in process.stdout


def test_unknown_flags_are_refused(capsys):
  assert soak.main(['--segmants=1']) == 2
  assert '--segmants=1' in capsys.readouterr().err
