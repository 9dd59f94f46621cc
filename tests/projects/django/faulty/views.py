"""Calls inside a transaction, and after it."""

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from orders import tasks
from orders.tasks import plain


def early(request: HttpRequest) -> HttpResponse:
    """Publish in the transaction of the request."""
    from orders.tasks import refund

    tasks.charge.delay(1)
    refund.apply_async((1,))
    return HttpResponse()


@transaction.atomic
def by_a_decorator() -> None:
    """Publish in a transaction."""
    tasks.charge.delay(2)


def in_a_block() -> None:
    """Publish in a transaction, and after it."""
    with transaction.atomic():
        tasks.charge.delay(3)


def in_time(request: HttpRequest) -> HttpResponse:
    """Publish after the commit, and what has no lease."""

    def publish() -> None:
        tasks.charge.delay(4)

    transaction.on_commit(publish)
    transaction.on_commit(lambda: tasks.charge.delay(5))
    tasks.charge.delay_on_commit(6)
    tasks.charge.delay_in(connection, 7)
    plain.delay(8)
    return HttpResponse()


@transaction.non_atomic_requests
def alone(request: HttpRequest) -> HttpResponse:
    """Publish outside a transaction."""
    tasks.charge.delay(9)
    return HttpResponse()


class Unconfigured:
    """What raises an error of its own when it is used too early."""

    @property
    def task(self) -> None:
        """Raise."""
        raise RuntimeError


unconfigured = Unconfigured()


def of_nothing() -> None:
    """Publish what cannot be found."""
    from ......nowhere import task  # type: ignore[import-not-found,misc]  # noqa: TID252

    with transaction.atomic():
        task.delay(10)
        unconfigured.task.delay(11)
