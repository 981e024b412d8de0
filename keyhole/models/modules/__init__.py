"""Replacements of modules of transformers that read a packed row of several sequences."""
