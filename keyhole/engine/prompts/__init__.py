"""Prompts that need not be computed: copies in memory, and prefixes on disk."""
