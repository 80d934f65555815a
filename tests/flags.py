"""Flags of XLA with which tests compile sooner."""

# XLA then takes less than half the time to compile. Islands have the same bits in all programs that
# are compiled in this way, too; the last flag is needed for that, since otherwise LLVM is given
# modules of other sizes in other programs.
COMPILED_SOON = ('--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false '
                 '--xla_cpu_parallel_codegen_split_count=1')
