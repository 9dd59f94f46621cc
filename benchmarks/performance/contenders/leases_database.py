"""celery_leases with ``leases_url="database"``: the claimed row is the lease."""

from celery import Celery

from benchmarks.performance.contenders import leases
from benchmarks.performance.contenders.leases import OPTIONS, in_request, prepare, run

__all__ = ["OPTIONS", "configure", "in_request", "prepare", "run"]


def configure(app: Celery) -> None:
    """Leases and records are one row."""
    leases.configure(app, "database")
