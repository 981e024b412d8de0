"""Drafts of the next tokens, which one step checks together."""
