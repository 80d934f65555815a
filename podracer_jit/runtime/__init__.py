"""Devices, hosts and channels between threads; no word of reinforcement learning."""
