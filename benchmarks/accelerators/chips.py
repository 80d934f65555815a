"""Devices that are not there: XLA compiles programs for them, which cannot run.

It needs the wheels of the extra `accelerators`. Kernels are not chosen by time, since nothing runs.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental import topologies

from podracer_jit.runtime import host

H100 = Path(__file__).with_name('h100.txtpb')  # XLA's description of the device
# A TPU's compiler asks Google's cloud where it runs, unless it is told.
TPU_ENV = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
           'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0',
           'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}  # several processes may compile at once
# Fusions of Triton get their configuration by trying it. The other flags are those of a run.
XLA_FLAGS = ['--xla_gpu_enable_triton_gemm=false',
             *(f'{flag}={value}' for flag, value in host.REPEATABLE.items())]
PLATFORMS = ('cuda', 'tpu')


def are_known() -> bool:
  """Returns whether the compilers for both platforms are installed."""
  return all(map(importlib.util.find_spec, ('jax_cuda13_plugin', 'libtpu')))


def prepare() -> None:
  """Sets what the compilers read when they start."""
  os.environ.update(TPU_ENV)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'
  os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *XLA_FLAGS])


def devices(platform: str, count: int) -> list[jax.Device]:
  """Returns up to four devices of a platform, `cuda` or `tpu`."""
  if platform == 'tpu':
    return list(topologies.get_topology_desc('v5e:2x2', 'tpu').devices)[:count]
  return list(topologies.get_topology_desc(
      '', 'cuda', target_config=H100.read_text(), topology=f'1x1x{count}').devices)
