#!/bin/bash
# One training on several machines; options before the script go to SLURM, the others to training:
#   sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 scripts/slurm.sh --config=... --workdir=...
# Each task is a process of the run. The processes find each other through SLURM's variables, and
# all must see the workdir. docs/pods.md has more, such as two tasks on a machine.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
# Before the time limit the tasks, not this script, get SIGTERM, at which the run saves.
#SBATCH --signal=TERM@120

# Since version 22.05 srun does not take this from sbatch, and EnvPool would have a single core.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# If one task has ended, the others have a minute: after a stop they save, after a failure they end
# by themselves. --kill-on-bad-exit would take the exit code 3 of the first for a failure.
code=0
srun --kill-on-bad-exit=0 --wait=60 .venv/bin/python -m podracer_jit --distributed "$@" || code=$?

# 3: stopped by a signal, and saved. The same command goes on.
if (( code == 3 )); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
