"""The table of schemes, and the graphs of workers that it names."""
