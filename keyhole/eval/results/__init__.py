"""Stored lines of an evaluation, and comparisons between them."""
