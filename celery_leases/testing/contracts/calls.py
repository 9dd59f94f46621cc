"""Calls for the contract suites, and functions that read the answers of all lease stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from uuid import uuid4

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, Holder, Refusal, Refused
from celery_leases.decide.before_run import holder_of_row
from celery_leases.keys import CallKey
from celery_leases.options import LeaseOptions
from celery_leases.record import Record


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


def acquired(answer: Acquired | Refused) -> bool:
    """Whether the call got the lease."""
    return isinstance(answer, Acquired)


def claimed(answer: Acquired | Refused) -> Record:
    """The claimed row; the claim must have succeeded."""
    assert isinstance(answer, Acquired), answer
    assert answer.record is not None, answer
    return answer.record


def why(answer: Acquired | Refused) -> Refusal | None:
    """Why the call did not get the lease."""
    return answer.why if isinstance(answer, Refused) else None


def held(answer: Acquired | Refused) -> Holder | None:
    """The holder of the lease if *answer* says that another attempt holds it."""
    if isinstance(answer, Refused) and answer.why is Refusal.HELD and answer.record is not None:
        return holder_of_row(answer.record)
    return answer.holder if isinstance(answer, Refused) else None
