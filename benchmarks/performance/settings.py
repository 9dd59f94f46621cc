"""What the processes of a contender are given by their environment."""

import os

CONTENDER = "BENCH_CONTENDER"
BROKER = "BENCH_BROKER"
LOCKS = "BENCH_LOCKS"
DATABASE = "BENCH_DATABASE"
JOURNAL = "BENCH_JOURNAL"
NOTES = "BENCH_NOTES"
"""What the journal is to say: letters of :mod:`benchmarks.performance.journal`."""

LOCK_SECONDS = 15
"""How long every lock and lease lasts: the default of ``lease_ttl``."""

FOR_EVER = -1.0
"""Seconds of a body that ends with its worker."""


def given(name: str) -> str:
    """The value of *name*; raises KeyError without one."""
    return os.environ[name]


def postgres_url() -> str:
    """The database as libpq writes it."""
    return given(DATABASE).replace("+psycopg", "", 1)
