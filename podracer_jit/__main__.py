"""python -m podracer_jit."""

from podracer_jit.run.main import run

run()
