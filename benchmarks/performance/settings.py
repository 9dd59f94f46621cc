"""The environment variables of a contender's processes."""

import os

CONTENDER = "BENCH_CONTENDER"
BROKER = "BENCH_BROKER"
LOCKS = "BENCH_LOCKS"
DATABASE = "BENCH_DATABASE"
JOURNAL = "BENCH_JOURNAL"
NOTES = "BENCH_NOTES"
"""The kinds of records in the journal: letters of :mod:`benchmarks.performance.journal`."""

LOCK_SECONDS = 15
"""The duration of every lock and lease: the default of ``lease_ttl``."""

FOR_EVER = -1.0
"""Seconds of a body that ends with its worker."""


def given(name: str) -> str:
    """The value of *name*; raises KeyError without one."""
    return os.environ[name]


def postgres_url() -> str:
    """The URL of the database for libpq."""
    return given(DATABASE).replace("+psycopg", "", 1)
