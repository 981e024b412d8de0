"""What the next step computes: who runs, in which order, and on which pages."""
