"""The files of a run: config, checkpoints, journals, sources, and their lock."""
