"""R: rollouts, with every environment in step or without, and initial priorities."""
