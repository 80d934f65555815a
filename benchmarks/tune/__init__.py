"""Searches for the fastest placement of an experiment on this machine."""
