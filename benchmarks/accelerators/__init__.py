"""Programs compiled for an H100 and a TPU v5e, on machines that have neither."""
