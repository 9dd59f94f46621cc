"""Its time is none."""

from celery import shared_task

from celery_leases import LeasedTask


@shared_task(base=LeasedTask, lease_ttl="soon")
def hurried(number: int) -> int:
    """Ask for a lease of an unknown length."""
    return number
