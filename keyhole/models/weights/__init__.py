"""Weights other than plain numbers: packed in few bits, as checkpoints store them, and adapters."""
