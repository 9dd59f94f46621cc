"""Shared code of the two handwritten contenders: a table, and a connection for each process."""

import psycopg

from benchmarks.performance import settings

TABLE = """CREATE TABLE IF NOT EXISTS job_record (
    key text PRIMARY KEY,
    state text NOT NULL,
    owner text,
    attempts int NOT NULL DEFAULT 1,
    claimed_at timestamptz,
    done_at timestamptz,
    result jsonb
)"""
CLAIM = """INSERT INTO job_record (key, state, owner, attempts, claimed_at) VALUES (%s, 'running', %s, 1, now())
ON CONFLICT (key) DO UPDATE
SET state = 'running', owner = excluded.owner, attempts = job_record.attempts + 1, claimed_at = now()
WHERE job_record.state <> 'done' {free} RETURNING attempts"""
SETTLE = """UPDATE job_record SET state = 'done', done_at = now(), result = '1'
WHERE key = %s AND owner = %s AND state = 'running'"""


def connected() -> psycopg.Connection:
    """A connection with autocommit and prepared statements."""
    connection = psycopg.connect(settings.postgres_url(), autocommit=True)
    connection.prepare_threshold = 0
    return connection


def prepare() -> None:
    """Create the table."""
    with connected() as connection:
        connection.execute(TABLE)
