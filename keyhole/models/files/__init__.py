"""A model's files: locating and reading them, without torch."""
