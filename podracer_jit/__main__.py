"""python -m podracer_jit."""

from podracer_jit.cli.main import run

run()
