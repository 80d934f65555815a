"""Simulated machines of a Ray cluster: real daemons of Ray on this machine, in a process apart.

The process reads commands from its standard input: `add CPUS` begins a node, `remove INDEX` kills
one. It ends, with all nodes, when its input does.
"""

import os
import subprocess
import sys
import uuid

import psutil

# The cluster has a password, as the docs advise.
TOKEN = {'RAY_AUTH_MODE': 'token',
         'RAY_AUTH_TOKEN': os.environ.get('RAY_AUTH_TOKEN') or uuid.uuid4().hex,
         'RAY_USAGE_STATS_ENABLED': '0',
         # Otherwise the processes of runs would hardly run beside other tests.
         'RAY_worker_niceness': '0'}
# Ray reads these variables when it is imported.
os.environ |= TOKEN
STORE = 100 * 2**20  # bytes


class Nodes:
  """A cluster whose head runs only the driver; a context manager."""

  def __enter__(self):
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.ray_nodes'], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)})
    self.address = self._answer()
    self.variables = TOKEN | {'RAY_ADDRESS': self.address}
    self._raylets = []
    return self

  def __exit__(self, *exc):
    self._process.stdin.close()
    try:
      self._process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      self._process.kill()
    self._process.stdout.close()

  def _answer(self):
    return self._process.stdout.readline().strip()

  def _ask(self, *words):
    print(*words, file=self._process.stdin, flush=True)
    return self._answer()

  def add(self, cpus):
    """Begins a node; returns its index."""
    self._raylets.append(int(self._ask('add', cpus)))
    return len(self._raylets) - 1

  def remove(self, index):
    """Kills a node with all its processes."""
    self._ask('remove', index)

  def processes(self, index):
    """Returns the processes of runs on a node, oldest first."""
    if not psutil.pid_exists(self._raylets[index]):
      return []
    children = psutil.Process(self._raylets[index]).children()
    return [child for child in children if is_ours(child)]


def is_ours(process):
  """Tells whether a process belongs to a run, and is no daemon of Ray."""
  try:
    return any('ray::Process' in word for word in process.cmdline())
  except psutil.Error:
    return False


def main() -> None:
  from ray.cluster_utils import Cluster
  cluster = Cluster(initialize_head=True, head_node_args=dict(
      num_cpus=0, include_dashboard=False, object_store_memory=STORE,
      # A lost node is noticed within seconds.
      _system_config={'health_check_initial_delay_ms': 1000, 'health_check_period_ms': 500,
                      'health_check_failure_threshold': 3}))
  print(cluster.address, flush=True)
  nodes = []
  for line in sys.stdin:
    word, number = line.split()
    if word == 'add':
      nodes.append(cluster.add_node(num_cpus=int(number), object_store_memory=STORE))
      print(nodes[-1].all_processes['raylet'][0].process.pid, flush=True)
    else:
      cluster.remove_node(nodes[int(number)], allow_graceful=False)
      print('removed', flush=True)
  cluster.shutdown()


if __name__ == '__main__':
  main()
