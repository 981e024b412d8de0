"""Decode steps beside llama.cpp, in an environment of its own: `python -m benchmarks.llama_cpp`."""
