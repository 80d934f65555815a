"""Functions for config files: `config` makes a whole config, `arguments` reads its argument."""

from podracer_jit.experiment.schema import arguments as arguments
from podracer_jit.experiment.schema import config as config
