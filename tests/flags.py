"""Flags of XLA that make tests compile faster."""

import importlib.metadata

from podracer_jit.runtime.tried import order

# XLA takes less than half the time to compile with these flags. Islands still have the same bits in
# all programs. That needs the last flag: otherwise LLVM would get modules of different sizes in
# different programs.
_FLAGS = ('--xla_backend_optimization_level=0', '--xla_cpu_use_fusion_emitters=false',
          '--xla_cpu_parallel_codegen_split_count=1')
# A flag that XLA does not know aborts the process.
_GONE = {'--xla_cpu_use_fusion_emitters=false': (0, 11)}
_JAXLIB = order(importlib.metadata.version('jaxlib'))
COMPILED_SOON = ' '.join(flag for flag in _FLAGS if flag not in _GONE or _JAXLIB < _GONE[flag])
