"""One mistake in each task."""

from celery import shared_task
from django.db import connection, transaction

from celery_leases import LeasedTask


@shared_task(base=LeasedTask, autoretry_for=(ValueError,))
def retrying(number: int) -> int:
    """A leased task with retries of Celery's own."""
    return number


@shared_task(base=LeasedTask, lease_key="nightly")
def nightly() -> None:
    """A task that beat calls, with one key for all calls."""


@shared_task(lease_key="order:{number}")
def bare(number: int) -> int:
    """A task with options of a lease, and without one."""
    return number


def buy(number: int) -> None:
    """Enqueue a call in a transaction."""
    with transaction.atomic():
        retrying.delay_in(connection, number)
