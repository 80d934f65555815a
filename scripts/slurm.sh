#!/bin/bash
# One training on several machines: sbatch --nodes=4 scripts/slurm.sh --config=... --workdir=...
# Each machine has one process, with the devices that the placement names. All machines must see the
# workdir. The processes find each other through SLURM's variables. Before the time limit SLURM sends
# SIGTERM, at which the run saves; the same command goes on.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
srun --kill-on-bad-exit=1 .venv/bin/python -m podracer_jit --distributed "$@"
