"""Claim requests for the contract suites, and functions that read the answers of all lease
stores.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery_leases.decide.answers import Acquired, BlockedByGate, Claimed, Cooling, Held, Holder
from celery_leases.record import ClaimRequest, State, Won

Answer = Acquired | Held | Cooling | BlockedByGate | Claimed


def fresh_key() -> str:
    """A stored key that was never used."""
    return f"t:contract|{uuid4().hex}"


def make_claim_request(
    stored_key: str, token: str | None = None, *, ttl: float = 15.0, **more: Any
) -> ClaimRequest:
    """A request for *ttl* seconds, of a new call and with a new token unless they are given."""
    token = token or uuid4().hex
    given = {
        "task": "contract",
        "key": stored_key,
        "call_id": f"call-{uuid4().hex}",
        "holder": f"host-{token[:6]}/1",
    }
    return ClaimRequest(stored_key=stored_key, token=token, ttl=ttl, **(given | more))


def acquired(answer: Answer) -> bool:
    """Whether the request got the lease."""
    return isinstance(answer, Acquired) or (
        isinstance(answer, Claimed) and isinstance(answer.claim, Won)
    )


def held(answer: Answer) -> Holder | None:
    """The holder of the lease if *answer* says that another attempt holds it."""
    match answer:
        case Held(holder):
            return holder
        case Claimed(claim) if not isinstance(claim, Won) and claim.record is not None:
            record = claim.record
            if record.state is State.RUNNING and record.lease_remaining > 0:
                return Holder(
                    record.owner,
                    record.call_id,
                    record.holder,
                    record.lease_ttl,
                    record.lease_remaining,
                )
    return None
