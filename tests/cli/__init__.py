"""Tests of podracer_jit/cli."""
