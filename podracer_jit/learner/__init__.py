"""G and U: updates from rollouts and from a replay, and their programs."""
