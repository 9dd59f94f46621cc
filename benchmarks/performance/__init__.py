"""What a leased task costs, beside plain Celery, packages with the same purpose, and code written
by hand.

``python -m benchmarks.performance`` makes a pinned environment for each contender, lets them take
turns on a private Redis and a private PostgreSQL, prints the tables of ``docs/performance.md``, and
writes them there. It needs Linux.
"""
