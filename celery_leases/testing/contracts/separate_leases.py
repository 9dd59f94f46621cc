"""What lease stores apart from the records must do: subclass, and give it as the fixture
``store``.
"""

from __future__ import annotations

import time
from uuid import uuid4

import pytest

from celery_leases.protocol.ports import (
    Acquired,
    Cooling,
    LeaseStore,
    Renewal,
    RenewalResult,
    SeparateLeaseStore,
)
from celery_leases.testing.contracts.claim_requests import acquired, held, make_claim_request
from celery_leases.testing.contracts.leases import PATIENCE, LeaseStoreContract
from celery_leases.testing.waits import wait_until


class SeparateLeaseStoreContract(LeaseStoreContract):
    """For a lease store apart from the records, which may forget what they remember, and come up
    empty.
    """

    def test_a_young_store_grants_a_free_key_and_says_how_old_it_is(
        self, store: LeaseStore, key: str
    ) -> None:
        """The bidder must leave a running row to its holder for as long as that may take to assert
        its lease again.
        """
        assert acquired(store.acquire(make_claim_request(key, ttl=self.ttl)))
        young = store.age(key)
        assert young >= 0
        assert held(store.acquire(make_claim_request(key, ttl=self.ttl)))
        assert store.age(key) >= young

    def test_a_forgotten_lease_is_asserted_again(self, store: LeaseStore, key: str) -> None:
        """It is as exclusive as before, and asserting it twice is harmless."""
        claim_request = make_claim_request(key, ttl=self.ttl)
        assert store.reassert(claim_request)
        assert store.reassert(claim_request)
        assert held(store.acquire(make_claim_request(key, ttl=self.ttl)))
        holder = store.holder(key)
        assert holder is not None
        assert (holder.token, holder.call_id, holder.host) == (
            claim_request.token,
            claim_request.call_id,
            claim_request.holder,
        )

    def test_asserting_again_never_cuts_a_longer_lease(self, store: LeaseStore, key: str) -> None:
        """Nor does it move a lease that was never forgotten."""
        claim_request = make_claim_request(key, ttl=60 * self.ttl)
        assert acquired(store.acquire(claim_request))
        assert store.reassert(make_claim_request(key, claim_request.token, ttl=self.short))
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 50 * self.ttl

    def test_a_lease_of_another_is_not_overwritten(self, store: LeaseStore, key: str) -> None:
        """Whoever came while the store had forgotten us keeps the key."""
        successor = make_claim_request(key, ttl=self.ttl)
        assert acquired(store.acquire(successor))
        assert not store.reassert(make_claim_request(key, ttl=self.ttl))
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == successor.token

    def test_a_bounded_store_has_the_same_leases(self, store: SeparateLeaseStore, key: str) -> None:
        """The thread that renews leases uses one."""
        claim_request = make_claim_request(key, ttl=self.ttl)
        assert acquired(store.acquire(claim_request))
        bounded = store.bounded(PATIENCE, PATIENCE)
        try:
            assert (bounded.name, bounded.in_records) == (store.name, False)
            renewal = Renewal(key, claim_request.token, self.ttl)
            assert bounded.renew([renewal]) == [RenewalResult.OURS]
            assert held(bounded.acquire(make_claim_request(key, ttl=self.ttl)))
        finally:
            bounded.close()
        assert store.release(key, claim_request.token)

    def test_a_store_that_works_may_be_used_by_a_worker(self, store: SeparateLeaseStore) -> None:
        """What it warns of is a text."""
        warning = store.check()
        assert warning is None or warning

    # -- cooldowns ---------------------------------------------------------------------------------

    def test_a_key_that_cools_is_nobodys(self, store: LeaseStore, key: str) -> None:
        """Every bid learns how long it lasts, the owner's own too; it is no lease, and not listed
        as one.
        """
        claim_request = make_claim_request(key, ttl=self.ttl)
        assert acquired(store.acquire(claim_request))
        assert store.cool(key, claim_request.token, 4 * self.ttl)
        for rival in (claim_request, make_claim_request(key, ttl=self.ttl)):
            answer = store.acquire(rival)
            assert isinstance(answer, Cooling)
            assert 3 * self.ttl < answer.remaining <= 4 * self.ttl
        assert store.holder(key) is None
        assert store.held([key]) == set()

    def test_nothing_the_owner_still_does_touches_its_cooldown(
        self, store: LeaseStore, key: str
    ) -> None:
        """A renewal, an assertion or a release may come late; the same cooldown again changes
        nothing.
        """
        claim_request = make_claim_request(key, ttl=self.ttl)
        assert acquired(store.acquire(claim_request))
        assert store.cool(key, claim_request.token, 4 * self.ttl)
        assert store.renew([Renewal(key, claim_request.token, 9 * self.ttl)]) == [
            RenewalResult.OTHER
        ]
        assert not store.reassert(claim_request)
        assert not store.release(key, claim_request.token)
        assert store.cool(key, claim_request.token, 9 * self.ttl)
        answer = store.acquire(claim_request)
        assert isinstance(answer, Cooling)
        assert answer.remaining <= 4 * self.ttl

    @pytest.mark.parametrize("seconds", [2.0, 0.1])
    def test_a_cooldown_lasts_as_long_as_it_was_given(
        self, store: LeaseStore, key: str, seconds: float
    ) -> None:
        """Whatever was left of the lease; then the key is free by itself."""
        claim_request = make_claim_request(key, ttl=self.short)
        assert acquired(store.acquire(claim_request))
        began = time.monotonic()
        assert store.cool(key, claim_request.token, seconds * self.short)
        successor = make_claim_request(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(successor)),
            seconds * self.short + PATIENCE,
            "the cooldown to end",
        )
        assert time.monotonic() - began >= seconds * self.short * 0.99

    def test_only_the_holder_cools_the_key(self, store: LeaseStore, key: str) -> None:
        """Neither a stranger nor an owner whose lease another has by now."""
        assert not store.cool(key, uuid4().hex, self.ttl)
        assert store.acquire(make_claim_request(key, ttl=self.short)) == Acquired()
        claim_request = make_claim_request(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(claim_request)),
            self.short + PATIENCE,
            "the lease to end",
        )
        for token in (
            uuid4().hex,
            claim_request.token[:-1],
            claim_request.token[1:],
            claim_request.token + "0",
        ):
            assert not store.cool(key, token, self.ttl)
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == claim_request.token

    def test_a_cooldown_is_ended_whoever_began_it(self, store: LeaseStore, key: str) -> None:
        """By an operator; a lease is left alone, and there is nothing to end twice."""
        claim_request = make_claim_request(key, ttl=self.ttl)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(claim_request))
        assert not store.end_cooldown(key)
        assert store.cool(key, claim_request.token, 9 * self.ttl)
        assert store.end_cooldown(key)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(make_claim_request(key, ttl=self.ttl)))
