"""Actors: programs that roll out environments, in lockstep or asynchronously."""
