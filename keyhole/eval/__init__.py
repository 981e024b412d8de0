"""What a method does on a model: is it exact, what does it read, where do DELTA's layers go."""
