"""What lease stores apart from the records must do: subclass, and give it as the fixture ``store``."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest

from celery_leases.core.ports import Acquired, Cooling, Kept, LeaseStore, Renewal
from celery_leases.testing.contracts.bids import acquired, held, make_bid
from celery_leases.testing.contracts.leases import PATIENCE, LeaseStoreContract
from celery_leases.testing.process import wait_until


class SeparateLeaseStoreContract(LeaseStoreContract):
    """For a lease store apart from the records, which may forget what they remember, and come up empty."""

    def test_a_young_store_grants_a_free_key_and_says_how_old_it_is(self, store: LeaseStore, key: str) -> None:
        """The bidder must leave a running row to its holder for as long as that may take to assert its lease again."""
        assert acquired(store.acquire(make_bid(key, ttl=self.ttl)))
        young = store.age(key)
        assert young >= 0
        assert held(store.acquire(make_bid(key, ttl=self.ttl)))
        assert store.age(key) >= young

    def test_a_forgotten_lease_is_asserted_again(self, store: LeaseStore, key: str) -> None:
        """It is as exclusive as before, and asserting it twice is harmless."""
        bid = make_bid(key, ttl=self.ttl)
        assert store.reassert(bid)
        assert store.reassert(bid)
        assert held(store.acquire(make_bid(key, ttl=self.ttl)))
        holder = store.holder(key)
        assert holder is not None
        assert (holder.token, holder.call_id, holder.host) == (bid.token, bid.call_id, bid.holder)

    def test_asserting_again_never_cuts_a_longer_lease(self, store: LeaseStore, key: str) -> None:
        """Nor does it move a lease that was never forgotten."""
        bid = make_bid(key, ttl=60 * self.ttl)
        assert acquired(store.acquire(bid))
        assert store.reassert(make_bid(key, bid.token, ttl=self.short))
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 50 * self.ttl

    def test_a_lease_of_another_is_not_overwritten(self, store: LeaseStore, key: str) -> None:
        """Whoever came while the store had forgotten us keeps the key."""
        successor = make_bid(key, ttl=self.ttl)
        assert acquired(store.acquire(successor))
        assert not store.reassert(make_bid(key, ttl=self.ttl))
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == successor.token

    # -- cooldowns -----------------------------------------------------------------------------------------

    def test_a_key_that_cools_is_nobodys(self, store: LeaseStore, key: str) -> None:
        """Every bid learns how long it lasts, the owner's own too; it is no lease, and not listed as one."""
        bid = make_bid(key, ttl=self.ttl)
        assert acquired(store.acquire(bid))
        assert store.cool(key, bid.token, 4 * self.ttl)
        for rival in (bid, make_bid(key, ttl=self.ttl)):
            answer = store.acquire(rival)
            assert isinstance(answer, Cooling)
            assert 3 * self.ttl < answer.remaining <= 4 * self.ttl
        assert store.holder(key) is None
        assert key not in dict(store.holders(100_000))

    def test_nothing_the_owner_still_does_touches_its_cooldown(self, store: LeaseStore, key: str) -> None:
        """A renewal, an assertion or a release may come late; the same cooldown again changes nothing."""
        bid = make_bid(key, ttl=self.ttl)
        assert acquired(store.acquire(bid))
        assert store.cool(key, bid.token, 4 * self.ttl)
        assert store.renew([Renewal(key, bid.token, 9 * self.ttl)]) == [Kept.OTHER]
        assert not store.reassert(bid)
        assert not store.release(key, bid.token)
        assert store.cool(key, bid.token, 9 * self.ttl)
        answer = store.acquire(bid)
        assert isinstance(answer, Cooling)
        assert answer.remaining <= 4 * self.ttl

    @pytest.mark.parametrize("seconds", [2.0, 0.1])
    def test_a_cooldown_lasts_as_long_as_it_was_given(self, store: LeaseStore, key: str, seconds: float) -> None:
        """Whatever was left of the lease; then the key is free by itself."""
        bid = make_bid(key, ttl=self.short)
        assert acquired(store.acquire(bid))
        began = time.monotonic()
        assert store.cool(key, bid.token, seconds * self.short)
        successor = make_bid(key, ttl=self.ttl)
        wait_until(lambda: acquired(store.acquire(successor)), seconds * self.short + PATIENCE, "the cooldown to end")
        assert time.monotonic() - began >= seconds * self.short * 0.99

    def test_only_the_holder_cools_the_key(self, store: LeaseStore, key: str) -> None:
        """Neither a stranger nor an owner whose lease another has by now."""
        assert not store.cool(key, uuid4().hex, self.ttl)
        assert store.acquire(make_bid(key, ttl=self.short)) == Acquired()
        bid = make_bid(key, ttl=self.ttl)
        wait_until(lambda: acquired(store.acquire(bid)), self.short + PATIENCE, "the lease to end")
        for token in (uuid4().hex, bid.token[:-1], bid.token[1:], bid.token + "0"):
            assert not store.cool(key, token, self.ttl)
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == bid.token

    def test_a_cooldown_is_ended_whoever_began_it(self, store: LeaseStore, key: str) -> None:
        """By an operator; a lease is left alone, and there is nothing to end twice."""
        bid = make_bid(key, ttl=self.ttl)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(bid))
        assert not store.end_cooldown(key)
        assert store.cool(key, bid.token, 9 * self.ttl)
        assert store.end_cooldown(key)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(make_bid(key, ttl=self.ttl)))
