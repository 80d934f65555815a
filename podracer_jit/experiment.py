"""What config files import: `config` makes a whole config, `arguments` reads a file's argument."""

from podracer_jit.run.config import arguments as arguments
from podracer_jit.run.config import config as config
