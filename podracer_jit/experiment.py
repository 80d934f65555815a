"""Functions for config files: `config` makes a whole config, `arguments` reads its argument."""

from podracer_jit.run.config import arguments as arguments
from podracer_jit.run.config import config as config
