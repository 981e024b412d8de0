"""Kernel benchmark: `python -m benchmarks.kernels`."""
