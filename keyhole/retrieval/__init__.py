"""Choosing before the step: a small head, pruned from a draft model (SpeContext, section 4.1)."""
