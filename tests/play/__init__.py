"""Tests of podracer_jit/play."""
