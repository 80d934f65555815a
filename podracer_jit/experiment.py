"""What config files import: `experiment.config` makes a whole config from the parts it names."""

from podracer_jit.run.experiment import config as config
