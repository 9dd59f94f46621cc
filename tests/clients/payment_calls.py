"""Payments: Stripe."""

from typing import Any

from tests.clients.expectations import (
    CONFLICT,
    DECLINED,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    TOLD_TO_STOP,
    UNAUTHORIZED,
    UNREACHABLE,
    cases,
)
from tests.clients.servers import (
    accepts_no_connection,
    answers,
    breaks_off,
    hangs_up,
    is_not_trusted,
    name_servers_away,
    never_answers,
    patience,
    refuses,
    resets,
)


def stripe(url: str) -> Any:
    import stripe as library

    http = library.RequestsClient(timeout=patience())
    try:
        client = library.StripeClient(
            "sk_test_made_up", base_addresses={"api": url}, http_client=http, max_network_retries=0
        )
        return client.v1.payment_intents.create({"amount": 100, "currency": "eur"})
    finally:
        http.close()


def stripe_by_httpx(url: str) -> Any:
    """One charge in an event loop of its own, over httpx."""
    import asyncio

    import stripe as library

    async def charge() -> Any:
        http = library.HTTPXClient(timeout=patience())
        client = library.StripeClient(
            "sk_test_made_up", base_addresses={"api": url}, http_client=http, max_network_retries=0
        )
        try:
            return await client.v1.payment_intents.create_async({"amount": 100, "currency": "eur"})
        finally:
            await http.close_async()

    return asyncio.run(charge())


def says(kind: str, code: str | None = None, **more: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": "No.", "code": code, **more}}


_DECLINED = says("card_error", "card_declined", decline_code="insufficient_funds", param="card")
_LIMIT = says("invalid_request_error", "rate_limit")
_LOCKED = says("invalid_request_error", "lock_timeout")
_FAULT = says("api_error")

STRIPE = [
    *cases(
        "stripe",
        stripe,
        {
            "402 CardError": (answers(402, _DECLINED), DECLINED),
            "402, stripe-should-retry: false": (
                answers(402, _DECLINED, stripe_should_retry="false"),
                DECLINED,
            ),
            "429": (answers(429, _LIMIT), RATE_LIMITED),
            "429, Retry-After": (answers(429, _LIMIT, retry_after="4"), RATE_LIMITED.after(4)),
            "429 lock_timeout": (answers(429, _LOCKED), CONFLICT),
            "409 lock_timeout": (answers(409, _LOCKED), CONFLICT),
            "409 idempotency_key_in_use": (
                answers(409, says("invalid_request_error", "idempotency_key_in_use")),
                CONFLICT,
            ),
            "401": (answers(401, says("invalid_request_error")), UNAUTHORIZED),
            "403": (answers(403, says("invalid_request_error")), REFUSED),
            "400": (answers(400, says("invalid_request_error", "parameter_missing")), REFUSED),
            "400 IdempotencyError": (answers(400, says("idempotency_error")), REFUSED),
            "404": (answers(404, says("invalid_request_error", "resource_missing")), REFUSED),
            "500": (answers(500, _FAULT), OUTCOME_UNKNOWN),
            "500, stripe-should-retry: false": (
                answers(500, _FAULT, stripe_should_retry="false"),
                TOLD_TO_STOP,
            ),
            "500, stripe-should-retry: true": (
                answers(500, _FAULT, stripe_should_retry="true"),
                OUTCOME_UNKNOWN,
            ),
            "502, not JSON": (answers(502, "<html>Bad Gateway</html>"), OUTCOME_UNKNOWN),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "hangs up": (hangs_up, OUTCOME_UNKNOWN),
            "resets": (resets, OUTCOME_UNKNOWN),
            "breaks off": (breaks_off, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "accepts nobody": (accepts_no_connection, UNREACHABLE),
            "name servers away": (name_servers_away, UNREACHABLE),
            "is not trusted": (is_not_trusted, REFUSED),
        },
    ),
    *cases(
        "stripe, httpx:",
        stripe_by_httpx,
        {
            "429, Retry-After": (answers(429, _LIMIT, retry_after="4"), RATE_LIMITED.after(4)),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "breaks off": (breaks_off, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "is not trusted": (is_not_trusted, REFUSED),
        },
    ),
]
