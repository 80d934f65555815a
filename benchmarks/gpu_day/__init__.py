"""The first quarter of an hour on a machine with one GPU; README.md has the order."""
