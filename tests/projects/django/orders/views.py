"""Views that start the work of an order."""

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse

from celery_leases.django.web import submit
from celery_leases.errors import KeyUnusable
from celery_leases.web.http import answer, idempotency_key
from orders.models import Order
from orders.tasks import charge


def buy(request: HttpRequest, number: int) -> HttpResponse:
    """Charge an order."""
    return submit(charge, (number,))


@transaction.atomic
def buy_in_a_transaction(request: HttpRequest, number: int) -> HttpResponse:
    """Create an order, and charge it; ``?fail`` rolls both back."""
    Order.objects.create(number=number)
    session = connection if "session" in request.GET else None
    sent = submit(charge, (number,), session=session)
    if "fail" in request.GET:
        transaction.set_rollback(True)
    return sent


def buy_with_a_key(request: HttpRequest) -> HttpResponse:
    """Charge the order 1, once for each ``Idempotency-Key``."""
    try:
        idempotency_key(request.headers.get("Idempotency-Key"), caller=7)
    except KeyUnusable as error:
        sent = answer(error)
        return HttpResponse(sent.content(), status=sent.status, headers=dict(sent.headers))
    return submit(charge, (1,), idempotent=True)


async def may_see(request: HttpRequest, key: str, task: str | None) -> bool:
    """Whether the request is that of the shop."""
    return request.headers.get("Authorization") == "shop"
