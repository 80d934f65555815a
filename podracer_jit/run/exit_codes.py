"""What the exit code of a training says; README has the same table."""

FINISHED = 0  # total_steps are reached
FAILED = 1  # something went wrong; the same command goes on from the newest checkpoint
REFUSED = 2  # nothing was begun: the command or the workdir is wrong
STOPPED = 3  # by a signal; all is saved, and the same command goes on
INTERRUPTED = 130  # by a signal, before there was anything to save
