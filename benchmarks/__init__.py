"""Benchmarks for developers; run them in the repository: `.venv/bin/python -m benchmarks.NAME`."""
