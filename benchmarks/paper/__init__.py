"""The papers' headline settings on a GPU."""
