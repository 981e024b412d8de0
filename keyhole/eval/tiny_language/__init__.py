"""The bundled model's language: its world, questions, programs and vocabulary."""
