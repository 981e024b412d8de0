"""The files of a model: where they are and what they say, without torch."""
