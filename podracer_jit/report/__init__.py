"""Reports of runs: one HTML page with figures and statistics, and tables as CSV."""
