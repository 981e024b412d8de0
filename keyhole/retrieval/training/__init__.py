"""Training SpeContext's retrieval head from a model."""
