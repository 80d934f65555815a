"""Processes that a cluster starts find each other by its variables; scripts/slurm.sh."""

import contextlib
import http.server
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from absl.flags import DEFINE_string, FlagValues

from podracer_jit.experiment.flags import parse
from podracer_jit.experiment.resolve import resolve
from podracer_jit.runtime import host
from podracer_jit.runtime.machine import Machine
from podracer_jit.workdir import checkpoints
from tests import made, processes
from tests.cli.test_together import CATCH, LONG, lines, train, verb, wait_for_updates
from tests.runs import QUICK

ROOT = Path(__file__).resolve().parents[2]
# JAX's class for SLURM takes the port of process 0 from the number of the job, in this range.
FIRST_PORT, PORTS = 61440, 4096


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The workdir of one process, which `test_together` has, too."""
  def make(workdir):
    result = train(workdir)
    assert result.returncode == 0, result.stderr
  return made.once(tmp_path_factory, 'alone', make)


@pytest.fixture
def port():
  """A port in the range of SLURM's, which no other test gets."""
  for port in random.sample(range(FIRST_PORT, FIRST_PORT + PORTS), 100):
    with socket.socket() as reserved:
      reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
      with contextlib.suppress(OSError):
        reserved.bind(('', port))
        yield port
        return


def slurm(port, tasks=2):
  """Returns the variables that SLURM sets in all tasks of a job of this machine."""
  return {'SLURM_JOB_ID': str(1000 * PORTS + port - FIRST_PORT), 'SLURM_NTASKS': str(tasks),
          'SLURM_STEP_NODELIST': 'localhost'}


def task_of_slurm(number):
  return {'SLURM_PROCID': str(number), 'SLURM_LOCALID': str(number)}


def start(workdir, variables, *args):
  """Starts one process of a run, without any flag on the others."""
  return subprocess.Popen(processes.command(*CATCH, f'--workdir={workdir}', '--distributed', *args),
                          env=QUICK | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)


def outputs_of(started):
  try:
    outputs = [process.communicate(timeout=300)[0] for process in started]
  finally:
    for process in started:
      process.kill()
  assert [process.returncode for process in started] == [0] * len(started), outputs
  return outputs


def check_same_bits(alone, workdir):
  result = verb('compare', alone, workdir)
  assert 'identical: 11 updates, batches and parameters\n' in result.stdout, result.stdout


@pytest.mark.same_bits('2 processes that SLURM starts (simulated) and 1', 'IMPALA: MLP (`cleanba`)')
def test_tasks_of_slurm_find_each_other_and_make_the_bits_of_one_process(alone, port, tmp_path):
  workdir = tmp_path / 'run'
  started = [start(workdir, slurm(port) | task_of_slurm(i), f'--profile_dir={tmp_path}/trace',
                   '--profile_updates=4:5') for i in range(2)]
  outputs = outputs_of(started)
  assert 'finished at update 11' in outputs[0] and 'finished' not in outputs[1]
  check_same_bits(alone, workdir)
  for process in ('process0', 'process1'):
    assert list((tmp_path / 'trace' / process).glob('plugins/profile/*/*.xplane.pb'))
    assert (tmp_path / 'trace' / process / 'memory.prof').is_file()


def test_a_task_of_slurm_without_the_others_ends_with_one_line(port, tmp_path):
  process = start(tmp_path, slurm(port) | task_of_slurm(0), '--coordinator_timeout_s=2')
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 2
  assert out == ('podracer_jit: --distributed: not all processes joined within 2 s '
                 '(--coordinator_timeout_s)\n')


class Metadata(http.server.BaseHTTPRequestHandler):
  """The metadata of a Google machine, of which JAX asks for `tpu-env`."""

  def do_GET(self):  # noqa: N802 - the name that the server calls
    is_known = self.path.endswith('/attributes/tpu-env')
    self.send_response(200 if is_known else 404)
    self.end_headers()
    if is_known:
      self.wfile.write(b"ACCELERATOR_TYPE: 'v5litepod-8'\nWORKER_ID: '0'\n")

  def log_message(self, *args):
    """Prints nothing."""


@pytest.mark.full
@pytest.mark.same_bits('2 processes of a TPU pod (simulated) and 1', 'IMPALA: MLP (`cleanba`)')
def test_hosts_of_a_tpu_pod_on_kubernetes_find_each_other(alone, port, tmp_path):
  """JAX_FORCE_TPU_INIT has JAX believe in a machine with TPUs; JAX_PLATFORMS=cpu uses none."""
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Metadata) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pod = {'JAX_FORCE_TPU_INIT': '1', 'TPU_WORKER_HOSTNAMES': 'localhost,localhost',
           'GCE_METADATA_IP': f'127.0.0.1:{server.server_port}', 'JAX_COORDINATOR_PORT': str(port),
           'JAX_PLATFORMS': 'cpu'}
    outputs_of([start(tmp_path, pod | {'TPU_WORKER_ID': str(i)}) for i in range(2)])
    server.shutdown()
  check_same_bits(alone, tmp_path)


# The script for SLURM, with stand-ins for SLURM's commands.

SRUN = """#!{python}
import os, signal, subprocess, sys

options = [word for word in sys.argv[1:] if word.startswith('--')][:2]
assert options == ['--kill-on-bad-exit=0', '--wait=60'], options
_, *words = sys.argv[3:]  # the script's Python is that of .venv
with open('srun.log', 'a') as log:
  print(os.getpid(), os.environ['SRUN_CPUS_PER_TASK'], file=log)
tasks = [subprocess.Popen([sys.executable, '-P', *words], env=os.environ | dict(
             SLURM_STEP_NODELIST='localhost', SLURM_PROCID=str(i), SLURM_LOCALID=str(i)))
         for i in range(int(os.environ['SLURM_NTASKS']))]
signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" >> scontrol.log\n'


@pytest.fixture
def job(port, tmp_path):
  """Returns a function that starts scripts/slurm.sh as SLURM starts a job of two tasks."""
  for name, text in (('srun', SRUN.format(python=sys.executable)), ('scontrol', SCONTROL)):
    path = tmp_path / 'bin' / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
  # What a task is told of itself must come from srun.
  variables = slurm(port) | {'SLURM_CPUS_PER_TASK': '3',
                             'PATH': f'{tmp_path / "bin"}{os.pathsep}{os.environ["PATH"]}'}
  del variables['SLURM_STEP_NODELIST']

  def run(*args):
    return subprocess.Popen(['bash', ROOT / 'scripts' / 'slurm.sh', *args], env=QUICK | variables,
                            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)
  run.number = variables['SLURM_JOB_ID']
  return run


def test_a_job_of_slurm_that_was_stopped_is_queued_again_and_goes_on(job, tmp_path):
  for _ in range(2):
    before = len(lines(tmp_path / 'run/metrics.jsonl')) if (tmp_path / 'run').exists() else 0
    process = job(*CATCH, *LONG, '--workdir=run')
    wait_for_updates(process, tmp_path / 'run', before + 3)
    srun, cpus = (tmp_path / 'srun.log').read_text().splitlines()[-1].split()
    os.kill(int(srun), signal.SIGTERM)  # SLURM's --signal is for the tasks, not for the script
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 3 and cpus == '3', out
    assert (f'going on from update {before} ' in out) == bool(before)
  assert checkpoints.newest_whole(tmp_path / 'run') == len(lines(tmp_path / 'run/metrics.jsonl'))
  assert (tmp_path / 'scontrol.log').read_text() == 2 * f'requeue {job.number}\n'


def test_a_job_of_slurm_that_has_finished_or_was_refused_is_not_queued_again(job, alone, tmp_path):
  process = job(*CATCH, '--workdir=run')
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  check_same_bits(alone, tmp_path / 'run')
  process = job(*CATCH, '--workdir=gs://bucket/run')
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 2 and 'gs://bucket/run: is an address, not a path' in out, out
  assert not (tmp_path / 'scontrol.log').exists() and not (tmp_path / 'gs:').exists()


# The commands of docs/pods.md and docs/tpu.md: their configs fit the hosts that they ask for.

PAGE = ''.join((ROOT / 'docs' / name).read_text() for name in ('pods.md', 'tpu.md'))
COMMANDS = [text.replace('\\\n', ' ') for text in re.findall(r'```sh\n(.*?)```', PAGE, re.DOTALL)]


def placement_of(flags, machine, processes, monkeypatch):
  """Returns the placement of a command on such machines, and the experiment, which is checked."""
  monkeypatch.setattr(host, '_machine', [(machine, processes)])
  values = FlagValues()
  for name in ('workdir', 'profile_dir', 'profile_updates'):
    DEFINE_string(name, None, '', flag_values=values)
  experiment = resolve(parse(['podracer_jit', *flags], values))
  place = experiment.placement
  assert experiment.num_shards % (place.num_actors * processes) == 0
  assert experiment.num_grad_shards % (len(place.learner_devices) * processes) == 0
  assert experiment.env.num_envs % experiment.num_shards == 0
  return place, experiment


def test_the_pages_jobs_of_slurm_use_all_gpus_and_cores(monkeypatch):
  jobs = [shlex.split(text) for text in COMMANDS if text.startswith('sbatch ')]
  flags = [words[words.index('scripts/slurm.sh') + 1:] for words in jobs]
  assert len(jobs) == 2 and flags[0] == flags[1]  # one experiment, as the page says
  for words in jobs:
    options = dict(word.removeprefix('--').split('=')
                   for word in words[1:words.index('scripts/slurm.sh')])
    tasks = int(options.get('ntasks-per-node', 1))
    gpus = int(options['gpus-per-task' if tasks > 1 else 'gpus-per-node'])
    cores = int(options['cpus-per-task'])
    place, experiment = placement_of(flags[0], Machine(cores, 8, gpus),
                                     int(options['nodes']) * tasks, monkeypatch)
    assert len(place.actor_devices) == len(place.learner_devices) == gpus
    assert place.env_threads * gpus <= cores and experiment.microbatch_rows == 0


def test_the_pages_command_for_tpus_uses_all_chips(monkeypatch):
  text, = (text for text in COMMANDS if 'gcloud' in text and '-m podracer_jit' in text)
  training, = re.findall(r'-m podracer_jit --distributed (.*?)"', text)
  place, experiment = placement_of(shlex.split(training), Machine(112, 8, tpus=4), 4, monkeypatch)
  assert place.learner_devices == (0, 1, 2, 3) and experiment.microbatch_rows == 0
  assert experiment.num_grad_shards == 16


def test_the_pages_command_for_hosts_elsewhere_fits_as_many(monkeypatch):
  on_hosts, = (text for text in COMMANDS if '--coordinator_address=' in text)
  on_nodes, = (text for text in COMMANDS if 'launch -n numa' in text)
  for text in (on_hosts, on_nodes):
    flags = re.findall(r'--(?:config|workdir)\S*', text)
    place, experiment = placement_of(flags, Machine(16, 8), 2, monkeypatch)
    assert place.num_actors == 1
    assert experiment.num_shards // 2 * place.env_threads <= 16
    assert place.pin_envs == (text == on_nodes)
  assert '--num_processes=2' in on_hosts
