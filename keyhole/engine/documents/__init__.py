"""Stored documents in the engine: encoding, loading and filling prompts."""
