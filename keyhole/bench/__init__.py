"""Measurements on the machine at hand, beside what others do there: `keyhole bench`.

    kernels   time and bandwidth of every operation, on every path that this processor has
    decode    time and memory of a whole decode step over a long cache

All systems of a run take turns, in an order that rotates, and must agree before they are timed.
Every run adds a line to `benchmarks/results/`; `report` makes tables and pictures of these lines.
"""
