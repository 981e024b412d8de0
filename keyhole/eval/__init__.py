"""Evaluates methods on a model: exactness, accuracy, what is read, and where DELTA's layers go."""
