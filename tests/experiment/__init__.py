"""Tests of podracer_jit/experiment."""
