"""Reuse methods beside each other at equal budgets."""
