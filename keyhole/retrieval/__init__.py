"""Retrieval heads, pruned from a draft model: selection before a step (SpeContext, 4.1)."""
