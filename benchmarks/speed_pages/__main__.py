"""`python -m benchmarks.speed_pages` rewrites the tables and figures of docs/."""

from benchmarks.speed_pages import main

main()
