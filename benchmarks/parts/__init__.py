"""Measures the parts of an experiment: speed, memory, and where the time of a round goes."""
