"""Policies that give up tokens for good: what was evicted is never read again."""
