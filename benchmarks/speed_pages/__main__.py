"""`python -m benchmarks.speed_pages` writes the tables and pictures of docs/ again."""

from benchmarks.speed_pages import main

main()
