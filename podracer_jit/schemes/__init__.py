"""The table of schemes, and the graphs that it names."""
