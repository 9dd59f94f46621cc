"""The same difficult cases on plain Celery, on packages with the same purpose, and here.

``python -m benchmarks.peers`` makes a pinned environment for each package, plays every case with
real workers on private Redis servers, and prints the table of ``docs/comparison.md``; ``--check``
compares the two.
"""
