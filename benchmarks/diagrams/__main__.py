"""Writes the diagrams."""

from benchmarks.diagrams import IMAGES, render

for name, text in render().items():
    (IMAGES / name).write_text(text)
    print(f"written: docs/images/{name}")
