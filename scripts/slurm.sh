#!/bin/bash
# One training on several machines: sbatch --nodes=4 scripts/slurm.sh --config=... --workdir=...
# A process a machine, with as many of its devices as the placement names; the workdir must be on a file system that all of them see. SLURM's own
# variables tell the processes of each other. Before the time is up SLURM sends SIGTERM, which saves;
# the same command goes on.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
srun --kill-on-bad-exit=1 .venv/bin/python -m podracer_jit --distributed "$@"
