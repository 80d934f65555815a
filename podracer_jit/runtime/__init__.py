"""Devices, hosts and channels between threads, independent of reinforcement learning."""
