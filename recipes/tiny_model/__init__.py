"""The bundled model, a small Llama that really uses its long context, and how it was made."""
