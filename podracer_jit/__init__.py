"""Deep reinforcement learning at the speed of the simulator."""
