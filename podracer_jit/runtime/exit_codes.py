"""Exit codes of a training; README has the same table."""

FINISHED = 0  # total_steps are reached
FAILED = 1  # an error; the same command resumes from the newest checkpoint
REFUSED = 2  # the training did not start: the command or the workdir is wrong
STOPPED = 3  # a signal; everything is saved, and the same command resumes
INTERRUPTED = 130  # a signal before training, or a second one, which saves nothing
