"""Measurements: each appends a JSON line to `results/`, with all that it needs to be repeated."""
