"""Properties of whole runs that hold for any experiment, placement and scheme."""
