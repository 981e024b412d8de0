"""Decode steps that load keys and values from offloaded layers: python -m benchmarks.offload."""
