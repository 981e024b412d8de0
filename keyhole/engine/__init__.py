"""The engine: sequences, the scheduler, the model runner and the step."""
