"""The tasks of the shop."""

from typing import Any

from celery import shared_task
from django.db.models import F

from celery_leases import Failures, LeasedTask
from orders.models import Order


@shared_task(base=LeasedTask, bind=True, lease_key="charge:{number}")
def charge(self: Any, number: int) -> dict[str, int]:
    """Charge an order; it counts how often that was done."""
    Order.objects.filter(number=number).update(charges=F("charges") + 1)
    return {"order": number, "attempt": self.lease.attempt}


@shared_task(base=LeasedTask, lease_key="refund:{number}", lease_failures=Failures(failures=1))
def refund(number: int) -> None:
    """Refuse each refund."""
    raise ValueError(f"order {number} was not charged")


@shared_task
def plain(number: int) -> int:
    """A task without a lease."""
    return number


@shared_task(base=LeasedTask, lease_key="late:{number}", lease_runs="each")
def late(number: int) -> int:
    """Find an order that may not be there yet."""
    return Order.objects.get(number=number).charges


@shared_task(base=LeasedTask, lease_key="index:{number}", lease_runs="latest")
def index(number: int) -> int:
    """Index an order as it is now."""
    return number
