"""Tests of podracer_jit/workdir."""
