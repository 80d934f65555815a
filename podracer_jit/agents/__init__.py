"""Networks, policies, running moments and optimizers."""
