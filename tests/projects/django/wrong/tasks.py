"""A task whose lease_ttl is not a duration."""

from celery import shared_task

from celery_leases import LeasedTask


@shared_task(base=LeasedTask, lease_ttl="soon")
def with_a_wrong_ttl(number: int) -> int:
    """Return the number."""
    return number
