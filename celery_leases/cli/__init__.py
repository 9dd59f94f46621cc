"""``celery -A proj leases …``: look at keys and groups, repair them, explain rules, and make the tables."""

from celery_leases.cli import explain, groups, keys, outgoing, tables
from celery_leases.cli.group import leases

__all__ = ["explain", "groups", "keys", "leases", "outgoing", "tables"]
