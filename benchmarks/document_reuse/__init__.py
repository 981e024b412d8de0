"""Compares reuse methods at equal budgets."""
