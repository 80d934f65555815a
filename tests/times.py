"""A plugin of pytest that measures tests: seconds, and CPU seconds with all that they start.

scripts/test -p tests.times [...]   prints a table by file
scripts/test -p tests.times --times=FILE [...]   also writes a line of JSON for each test

CPU seconds vary less than seconds on a busy machine. Those of a shared fixture count for the first
test that uses it. Processes that outlive their test are not counted.
"""

import collections
import json
import resource
import time

import pytest

from tests import processes


def pytest_addoption(parser):
  parser.addoption('--times', metavar='FILE', help='write the times of each test as JSON')


def _cpu_s():
  children = resource.getrusage(resource.RUSAGE_CHILDREN)
  return (time.process_time() + children.ru_utime + children.ru_stime
          + processes.cpu_s_of_commands())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  item.stash[_START] = (time.monotonic(), _cpu_s())
  return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  report = yield
  if call.when == 'teardown':
    start, cpu_s = item.stash[_START]
    report.user_properties = [('times', (time.monotonic() - start, _cpu_s() - cpu_s))]
  return report


def pytest_runtest_logreport(report):
  for name, times in report.user_properties if report.when == 'teardown' else ():
    if name == 'times':
      _times[report.nodeid] = times


def pytest_terminal_summary(terminalreporter, config):
  """Writes the table: each file's tests, CPU seconds and seconds, the longest first."""
  files = collections.defaultdict(list)
  for test, times in _times.items():
    files[test.split('::')[0]].append(times)
  rows = sorted(((sum(cpu for _, cpu in times), sum(wall for wall, _ in times), len(times), file)
                 for file, times in files.items()), reverse=True)
  terminalreporter.section('times')
  terminalreporter.line('   CPU s       s  tests')
  for cpu_s, seconds, tests, file in rows:
    terminalreporter.line(f'{cpu_s:8.1f}{seconds:8.1f}{tests:7}  {file}')
  terminalreporter.line(f'{sum(row[0] for row in rows):8.1f}{sum(row[1] for row in rows):8.1f}'
                        f'{len(_times):7}')
  if config.getoption('--times'):
    with open(config.getoption('--times'), 'w') as out:
      for test, (seconds, cpu_s) in sorted(_times.items()):
        out.write(json.dumps(dict(test=test, cpu_s=round(cpu_s, 3), s=round(seconds, 3))) + '\n')


_START = pytest.StashKey()
_times = {}
