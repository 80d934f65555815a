"""Tests of podracer_jit/training."""
