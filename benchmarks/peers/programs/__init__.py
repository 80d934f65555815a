"""One program for each peer, which runs in the peer's own virtual environment."""
