"""The web app of the shop: ``uvicorn shop.web:app``."""

from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import Response

from celery_leases.web.fastapi import (
    AsyncLeaseClient,
    add_exception_handlers,
    leases_router,
    submit,
)
from celery_leases.web.http import idempotency_key
from shop import tasks

app = FastAPI()
add_exception_handlers(app)


def customer(authorization: Annotated[str | None, Header()] = None) -> str:
    """Who asks."""
    if authorization is None:
        raise HTTPException(401)
    return authorization


async def may_see(key: str, who: Annotated[str, Depends(customer)]) -> bool:
    """A customer sees orders of their own."""
    return key.startswith(f"order:{who}:")


app.include_router(
    leases_router(may_see, AsyncLeaseClient.from_app(tasks.app), task=tasks.order.name)
)


@app.post("/orders")
async def order(
    who: Annotated[str, Depends(customer)],
    amount: int = 1,
    key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
) -> Response:
    """Take an order under the client's own key."""
    request_key = idempotency_key(key, caller=who)
    place = f"/leases/order:{request_key}"
    return await submit(tasks.order, (request_key, amount), idempotent=True, location=place)
