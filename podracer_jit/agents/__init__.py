"""Networks, policies, running statistics and optimizers."""
