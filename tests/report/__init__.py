"""Tests of podracer_jit/report."""
