"""What the suites of groups share: fixtures, and functions that close groups and acquire leases."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, Refusal, Refused
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.stores.interfaces import LeaseStore, MarkedLeaseStore
from celery_leases.testing.contracts.calls import (
    acquired,
    fresh_key,
    make_call,
)
from celery_leases.testing.waits import wait_until

PATIENCE = 10.0
POLICY = CooldownPolicy(60, 2, 3600, 0)


class GroupCase:
    """The fixtures of the suites of groups. ``ttl`` is longer than a test; ``short`` is a time that
    tests wait. Both are seconds.
    """

    ttl = 15.0
    short = 0.4

    @pytest.fixture
    def store(self) -> MarkedLeaseStore:
        """The store under test; override this."""
        raise NotImplementedError("override the fixture `store` with a lease store that has groups")

    @pytest.fixture
    def group(self) -> str:
        """A cooldown group of the test's own."""
        return f"group-{uuid4().hex}"

    def call(self, group: str | None, **more: Any) -> Call:
        """A request for a new key in *group*."""
        return make_call(
            more.pop("key", None) or fresh_key(), group=group, **({"ttl": self.ttl} | more)
        )


def closing(
    server_delay: float | None = None, policy: CooldownPolicy = POLICY, **more: Any
) -> Closing:
    """A failure of a group, with the delay that the server asked for."""
    return Closing(
        policy,
        **({"reason": "rate_limited", "rule": "status:429", "message": "slow"} | more),
        server_delay=server_delay,
    )


def closed(
    store: MarkedLeaseStore, group: str, server_delay: float | None = None, **more: Any
) -> ClosedGroup:
    """The group after a failure of an attempt that is not the probe."""
    return store.groups.close(group, closing(server_delay, **more), uuid4().hex)


def probe_due(store: MarkedLeaseStore, group: str) -> None:
    """Make the group due for a probe after one closing."""
    closed(store, group, 0.02)
    until_probe_due(store, group)


def until_probe_due(store: MarkedLeaseStore, group: str) -> None:
    """Wait until the group is due for a probe."""
    wait_until(lambda: found(store, group).probe_due, PATIENCE, "the group to be due for a probe")


def found(store: MarkedLeaseStore, group: str) -> ClosedGroup:
    """The group, which must not be open."""
    closed_group = store.groups.get(group)
    assert closed_group is not None
    return closed_group


def freed(store: MarkedLeaseStore, group: str, token: str) -> ClosedGroup:
    """The group after *token*, which must be the probe, has freed its slot."""
    assert found(store, group).probe == token
    store.groups.release_slot(group, token)
    wait_until(lambda: found(store, group).probe != token, PATIENCE, "the slot to be free")
    return found(store, group)


def shut(store: LeaseStore, call: Call) -> ClosedGroup:
    """The group that refuses *call*, which it must."""
    answer = store.acquire(call)
    assert isinstance(answer, Refused), answer
    assert (answer.why, answer.record) == (Refusal.CLOSED, None)
    assert answer.closed_group is not None
    return answer.closed_group


def admitted(store: LeaseStore, call: Call) -> Call:
    """*call*, which must get the lease without being the probe."""
    answer = store.acquire(call)
    assert acquired(answer), answer
    assert not probing(answer)
    return call


def probe(store: LeaseStore, call: Call) -> Call:
    """*call*, which must get the lease and the probe slot."""
    answer = store.acquire(call)
    assert probing(answer), answer
    return call


def probing(answer: Acquired | Refused) -> bool:
    """Whether the call got the lease and the probe slot."""
    return isinstance(answer, Acquired) and answer.probe
