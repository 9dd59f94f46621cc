"""``celery -A proj leases …``: look at keys and groups, repair them, explain rules, and make the
tables.
"""

from celery_leases.cli import (
    cooldown_groups,
    doctor,
    drill,
    explain,
    exporter,
    keys,
    messages,
    migrate,
    repair,
    tune,
    web,
)
from celery_leases.cli.root import leases

__all__ = [
    "cooldown_groups",
    "doctor",
    "drill",
    "explain",
    "exporter",
    "keys",
    "leases",
    "messages",
    "migrate",
    "repair",
    "tune",
    "web",
]
