"""Eight virtual CPU devices and a fixed thread pool, set before JAX starts its first backend."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['NPROC'] = '16'  # the size of XLA's thread pool changes the bits of large reductions

import jax  # noqa: E402

jax.config.update('jax_num_cpu_devices', 8)


def pytest_configure(config):
  config.addinivalue_line('filterwarnings', 'ignore:::gymnasium')
