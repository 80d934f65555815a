"""python -m podracer_jit."""

from podracer_jit.run.train import run

run()
