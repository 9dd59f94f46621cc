"""The contract of lease stores outside the records: subclass it, and override the fixture
``store``.
"""

from __future__ import annotations

import time
from uuid import uuid4

import pytest

from celery_leases.decide.answers import (
    Acquired,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.stores.interfaces import LeaseStore
from celery_leases.testing.contracts.calls import acquired, held, make_call
from celery_leases.testing.contracts.leases import PATIENCE, LeaseStoreContract
from celery_leases.testing.waits import wait_until


class SeparateLeaseStoreContract(LeaseStoreContract):
    """For a lease store outside the records. It may lose leases that the records know of, for
    example at a restart.
    """

    def test_a_store_shows_for_how_long_it_has_had_its_leases(
        self, store: LeaseStore, key: str
    ) -> None:
        """A claim does not take over a running row for as long as its holder may need to write the
        lease again.
        """
        assert acquired(store.acquire(make_call(key, ttl=self.ttl)))
        young = store.age(key)
        assert young >= 0
        assert held(store.acquire(make_call(key, ttl=self.ttl)))
        assert store.age(key) >= young

    def test_a_lost_lease_is_written_again(self, store: LeaseStore, key: str) -> None:
        """It is exclusive as before, and writing it twice is harmless."""
        call = make_call(key, ttl=self.ttl)
        assert store.reassert(call, self.ttl)
        assert store.reassert(call, self.ttl)
        assert held(store.acquire(make_call(key, ttl=self.ttl)))
        holder = store.holder(key)
        assert holder is not None
        assert (holder.token, holder.call_id, holder.host) == (
            call.token,
            call.call_id,
            call.host,
        )

    def test_a_lost_lease_is_written_again_for_as_long_as_asked(
        self, store: LeaseStore, key: str
    ) -> None:
        """Its holder has extended it."""
        assert store.reassert(make_call(key, ttl=self.ttl), 60 * self.ttl)
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 50 * self.ttl

    def test_writing_again_never_shortens_a_longer_lease(self, store: LeaseStore, key: str) -> None:
        """Nor does it change a lease that was not lost."""
        call = make_call(key, ttl=60 * self.ttl)
        assert acquired(store.acquire(call))
        assert store.reassert(call, self.short)
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 50 * self.ttl

    def test_a_lease_of_another_is_not_overwritten(self, store: LeaseStore, key: str) -> None:
        """An attempt that has taken the key meanwhile keeps it."""
        successor = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(successor))
        assert not store.reassert(make_call(key, ttl=self.ttl), self.ttl)
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == successor.token

    def test_a_bounded_store_has_the_same_leases(self, store: LeaseStore, key: str) -> None:
        """The thread that renews leases uses a bounded store."""
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        bounded = store.bounded(PATIENCE, PATIENCE)
        try:
            assert bounded.name == store.name
            renewal = Renewal(key, call.token, self.ttl)
            assert bounded.renew([renewal]) == [RenewalResult.OURS]
            assert held(bounded.acquire(make_call(key, ttl=self.ttl)))
        finally:
            bounded.close()
        assert store.release(key, call.token)

    def test_a_store_that_works_may_be_used_by_a_worker(self, store: LeaseStore) -> None:
        """``check()`` returns a warning, or ``None``."""
        warning = store.check()
        assert warning is None or warning

    # -- cooldowns ---------------------------------------------------------------------------------

    def test_a_key_that_cools_down_has_no_holder(self, store: LeaseStore, key: str) -> None:
        """Each request, also the owner's, gets the remaining time. The cooldown is not a lease, and
        is not listed as one.
        """
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        assert store.cool(key, call.token, 4 * self.ttl)
        for rival in (call, make_call(key, ttl=self.ttl)):
            answer = store.acquire(rival)
            assert isinstance(answer, Refused)
            assert 3 * self.ttl < answer.remaining <= 4 * self.ttl
        assert store.holder(key) is None
        assert store.held([key]) == set()

    def test_nothing_the_owner_still_does_touches_its_cooldown(
        self, store: LeaseStore, key: str
    ) -> None:
        """A renewal, a second write or a release may come late. Starting the same cooldown again
        changes nothing.
        """
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        assert store.cool(key, call.token, 4 * self.ttl)
        assert store.renew([Renewal(key, call.token, 9 * self.ttl)]) == [RenewalResult.OTHER]
        assert not store.reassert(call, self.ttl)
        assert not store.release(key, call.token)
        assert store.cool(key, call.token, 9 * self.ttl)
        answer = store.acquire(call)
        assert isinstance(answer, Refused)
        assert answer.remaining <= 4 * self.ttl

    @pytest.mark.parametrize("seconds", [2.0, 0.1])
    def test_a_cooldown_lasts_as_long_as_it_was_given(
        self, store: LeaseStore, key: str, seconds: float
    ) -> None:
        """However much of the lease was left. Afterwards the key is free."""
        call = make_call(key, ttl=self.short)
        assert acquired(store.acquire(call))
        began = time.monotonic()
        assert store.cool(key, call.token, seconds * self.short)
        successor = make_call(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(successor)),
            seconds * self.short + PATIENCE,
            "the cooldown to end",
        )
        assert time.monotonic() - began >= seconds * self.short * 0.99

    def test_only_the_holder_cools_the_key(self, store: LeaseStore, key: str) -> None:
        """Neither an unknown token nor one whose lease another token holds now."""
        assert not store.cool(key, uuid4().hex, self.ttl)
        assert store.acquire(make_call(key, ttl=self.short)) == Acquired()
        call = make_call(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(call)),
            self.short + PATIENCE,
            "the lease to end",
        )
        for token in (
            uuid4().hex,
            call.token[:-1],
            call.token[1:],
            call.token + "0",
        ):
            assert not store.cool(key, token, self.ttl)
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == call.token

    def test_a_cooldown_is_ended_whoever_began_it(self, store: LeaseStore, key: str) -> None:
        """By an operator. A lease is not changed, and ending a cooldown twice changes nothing."""
        call = make_call(key, ttl=self.ttl)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(call))
        assert not store.end_cooldown(key)
        assert store.cool(key, call.token, 9 * self.ttl)
        assert store.end_cooldown(key)
        assert not store.end_cooldown(key)
        assert acquired(store.acquire(make_call(key, ttl=self.ttl)))
