"""The cost of a leased task, compared with plain Celery, similar packages, and handwritten code.

``python -m benchmarks.performance`` creates a pinned environment for each contender, runs them in
turns on a private Redis and a private PostgreSQL, and prints the tables and writes them to
``docs/explanation/performance.md``. It needs Linux.
"""
