"""What the gate suites share: the fixtures, and short words for closing gates and bidding under
them.
"""

from __future__ import annotations

from typing import Any, Protocol
from uuid import uuid4

import pytest

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.protocol.groups import Closing, Gate
from celery_leases.protocol.ports import Acquired, Claimed, GateStore, LeaseStore, Shut
from celery_leases.protocol.records import ClaimRequest
from celery_leases.testing.contracts.claim_requests import (
    Answer,
    acquired,
    fresh_key,
    make_claim_request,
)
from celery_leases.testing.waits import wait_until

PATIENCE = 10.0
POLICY = CooldownPolicy(60, 2, 3600, 0)


class GatedLeaseStore(LeaseStore, GateStore, Protocol):
    """A lease store that keeps the gates its bids are asked at."""


class GateCase:
    """Fixtures of the gate suites. ``ttl`` outlasts a test, ``short`` is what a test waits for;
    both are seconds.
    """

    ttl = 15.0
    short = 0.4

    @pytest.fixture
    def store(self) -> GatedLeaseStore:
        """The store under test; override this."""
        raise NotImplementedError(
            "override the fixture `store` with a lease store that keeps gates"
        )

    @pytest.fixture
    def group(self) -> str:
        """A cooldown group of the test's own."""
        return f"group-{uuid4().hex}"

    def claim_request(self, group: str | None, **more: Any) -> ClaimRequest:
        """A bid for a key of its own in *group*."""
        return make_claim_request(
            more.pop("key", None) or fresh_key(), group=group, **({"ttl": self.ttl} | more)
        )


def closing(told: float | None = None, policy: CooldownPolicy = POLICY, **more: Any) -> Closing:
    """A failure of a group."""
    return Closing(
        policy,
        **({"reason": "rate_limited", "rule": "status:429", "message": "slow"} | more),
        server_delay=told,
    )


def closed(store: GateStore, group: str, told: float | None = None, **more: Any) -> Gate:
    """The gate after a failure of somebody who does not probe."""
    return store.close_gate(group, closing(told, **more), uuid4().hex)


def half_open(store: GateStore, group: str) -> None:
    """Make the gate half-open, with one trip."""
    closed(store, group, 0.02)
    until_half_open(store, group)


def until_half_open(store: GateStore, group: str) -> None:
    """Wait for the gate's time to be over."""
    wait_until(lambda: found(store, group).half_open, PATIENCE, "the gate to be half-open")


def found(store: GateStore, group: str) -> Gate:
    """The gate, which must not be open."""
    gate = store.gate(group)
    assert gate is not None
    return gate


def shut(store: LeaseStore, claim_request: ClaimRequest) -> Gate:
    """The gate that must shut *claim_request* out."""
    answer = store.acquire(claim_request)
    assert isinstance(answer, Shut), answer
    assert answer.looked is store.in_records
    assert answer.record is None
    return answer.gate


def let_in(store: LeaseStore, claim_request: ClaimRequest) -> ClaimRequest:
    """The bid, which must be granted, and not as a probe."""
    answer = store.acquire(claim_request)
    assert acquired(answer), answer
    assert not probing(answer)
    return claim_request


def probe(store: LeaseStore, claim_request: ClaimRequest) -> ClaimRequest:
    """The bid, which must be granted as the probe."""
    answer = store.acquire(claim_request)
    assert probing(answer), answer
    return claim_request


def probing(answer: Answer) -> bool:
    """Whether lease and slot are the bidder's."""
    return acquired(answer) and isinstance(answer, Acquired | Claimed) and answer.probe
