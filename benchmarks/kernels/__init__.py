"""Operations beside their peers: `python -m benchmarks.kernels`."""
