"""The same difficult cases with plain Celery, with similar packages, and with celery_leases.

``python -m benchmarks.peers`` creates a pinned environment for each package, runs every case with
real workers on private Redis servers, and prints the table of ``docs/explanation/comparison.md``;
``--check`` compares it with the page.
"""
