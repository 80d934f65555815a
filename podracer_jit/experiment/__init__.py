"""Functions for config files: `config` makes a whole config, `arguments` reads its argument."""

from podracer_jit.experiment.config_dict import arguments as arguments
from podracer_jit.experiment.config_dict import config as config
