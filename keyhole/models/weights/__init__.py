"""Weights other than plain numbers: packed at load, quantised in checkpoints, and adapters."""
