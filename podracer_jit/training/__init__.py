"""From an experiment to updates: what a run is built of, its loop, and what it tells."""
