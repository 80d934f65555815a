"""python -m podracer_jit."""

from podracer_jit.main import run

run()
