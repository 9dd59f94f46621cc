"""Calls for the contract suites, and functions that read the answers of all lease stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, BlockedByGate, Claimed, Cooling, Held, Holder
from celery_leases.keys import CallKey
from celery_leases.options import LeaseOptions
from celery_leases.record import (
    State,
    Won,
)

Answer = Acquired | Held | Cooling | BlockedByGate | Claimed


def fresh_key() -> str:
    """A stored key that was never used."""
    return f"t:contract|{uuid4().hex}"


def make_call(
    stored_key: str,
    token: str | None = None,
    *,
    task: str = "contract",
    key: str | None = None,
    ttl: float = 15.0,
    each_runs: bool = False,
    retention: float | None = None,
    fingerprint: str | None = None,
    digests: Mapping[str, str] | None = None,
    **more: Any,
) -> Call:
    """A new call with a new token, unless they are given, whose lease lasts *ttl* seconds.

    *each_runs*: each call of the key runs.
    """
    token = token or uuid4().hex
    runs: Literal["once", "each"] = "each" if each_runs else "once"
    given = {"call_id": f"call-{uuid4().hex}", "host": f"host-{token[:6]}/1", "token": token}
    return Call(
        task=task,
        key=CallKey(stored_key if key is None else key, stored_key, fingerprint, digests),
        options=LeaseOptions(ttl=ttl, runs=runs, retention=retention or 7 * 86_400.0),
        **(given | more),
    )


def acquired(answer: Answer) -> bool:
    """Whether the call got the lease."""
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
