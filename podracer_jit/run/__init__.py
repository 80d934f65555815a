"""A run from its config to its files; the only room that reads flags and files."""
