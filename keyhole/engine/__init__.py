"""The engine: sequences, who runs in a step, the step itself, and the public `LLM`."""
