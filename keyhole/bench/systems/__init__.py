"""What takes part in a comparison: Keyhole, transformers, and programs of their own."""
