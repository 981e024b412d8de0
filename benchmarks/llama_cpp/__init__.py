"""Decode steps compared with llama.cpp, which has its own environment."""
