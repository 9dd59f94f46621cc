"""The contract of lease stores: subclass it, and override the fixture ``store``."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pytest

from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.stores.interfaces import LeaseStore
from celery_leases.testing.contracts.calls import (
    acquired,
    fresh_key,
    held,
    make_call,
)
from celery_leases.testing.contracts.mutual_exclusion import LeaseFuzz
from celery_leases.testing.waits import wait_until

THREADS = 8
BATCH = 50
PATIENCE = 10.0


class LeaseStoreContract:
    """For every ``LeaseStore``, also for one whose leases are rows of the records.

    No lease of ``ttl`` seconds may expire during a test. Tests wait for leases of ``short`` seconds
    to expire.
    """

    ttl = 15.0
    short = 0.4

    @pytest.fixture
    def store(self) -> LeaseStore:
        """The store under test; override this."""
        raise NotImplementedError("override the fixture `store` with a lease store")

    @pytest.fixture
    def key(self) -> str:
        """A stored key of the test's own."""
        return fresh_key()

    def test_a_free_key_is_granted_and_shows_its_holder(self, store: LeaseStore, key: str) -> None:
        """Other processes see its token, call, host, ttl and remaining time."""
        call = make_call(key, ttl=self.ttl)
        assert store.holder(key) is None
        assert acquired(store.acquire(call))
        holder = store.holder(key)
        assert holder is not None
        assert (holder.token, holder.call_id, holder.host) == (
            call.token,
            call.call_id,
            call.host,
        )
        assert holder.ttl == pytest.approx(self.ttl, abs=0.001)
        assert 0 < holder.remaining <= self.ttl

    def test_a_held_key_is_refused_and_names_its_holder(self, store: LeaseStore, key: str) -> None:
        """The refusal shows for how long the key is held, and changes nothing."""
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        for _ in range(2):
            answer = store.acquire(make_call(key, ttl=self.ttl))
            assert not acquired(answer)
            holder = held(answer)
            assert holder is not None
            assert (holder.token, holder.call_id, holder.host) == (
                call.token,
                call.call_id,
                call.host,
            )
            assert 0 < holder.remaining <= self.ttl

    def test_one_of_many_at_once_is_granted(self, store: LeaseStore, key: str) -> None:
        """Of eight threads that start at the same time, one gets the lease."""
        together = Barrier(THREADS)

        def call(_: int) -> bool:
            together.wait(PATIENCE)
            return acquired(store.acquire(make_call(key, ttl=self.ttl)))

        with ThreadPoolExecutor(THREADS) as threads:
            assert sum(threads.map(call, range(THREADS))) == 1

    def test_a_lease_under_our_own_token_is_ours(self, store: LeaseStore, key: str) -> None:
        """The reply to an earlier try may have been lost, so the same token gets its lease
        again.
        """
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        assert acquired(store.acquire(call))
        assert held(store.acquire(make_call(key, ttl=self.ttl)))

    def test_keys_do_not_touch_each_other(self, store: LeaseStore) -> None:
        """Not even with special characters in a key."""
        stem = fresh_key()
        odd = [
            "",
            "{x}",
            "}:lease",
            "}:mark:a",
            ":lease",
            " ",
            "*",
            "[a-z]?",
            "%",
            "'\"\\",
            "ключ",
            "a\nb",
            "x" * 180,
        ]
        calls = [make_call(stem + tail, ttl=self.ttl) for tail in odd]
        assert all(acquired(store.acquire(call)) for call in calls)
        for call in calls:
            holder = store.holder(call.key.stored)
            assert holder is not None
            assert holder.token == call.token

    def test_a_lease_ends_by_itself_and_not_before(self, store: LeaseStore, key: str) -> None:
        """The key of a dead worker is free after the ttl."""
        sent = time.monotonic()
        assert acquired(store.acquire(make_call(key, ttl=self.short)))
        successor = make_call(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(successor)), self.short + PATIENCE, "the lease to end"
        )
        assert time.monotonic() - sent >= self.short * 0.99

    # -- renewal -----------------------------------------------------------------------------------

    def test_each_lease_of_a_batch_gets_its_own_result(self, store: LeaseStore) -> None:
        """The results are in the order of the renewals: own, other and missing leases, mixed."""
        renewals: list[Renewal] = []
        expected: list[RenewalResult] = []
        for number in range(BATCH):
            call = make_call(fresh_key(), ttl=self.ttl)
            result = (RenewalResult.OURS, RenewalResult.OTHER, RenewalResult.MISSING)[number % 3]
            if result is not RenewalResult.MISSING:
                assert acquired(store.acquire(call))
            token = uuid4().hex if result is RenewalResult.OTHER else call.token
            renewals.append(Renewal(call.key.stored, token, 4 * self.ttl))
            expected.append(result)
        assert store.renew(renewals) == expected
        for renewal, result in zip(renewals, expected, strict=True):
            holder = store.holder(renewal.stored_key)
            if result is RenewalResult.MISSING:
                assert holder is None
            else:
                assert holder is not None
                assert (holder.remaining > self.ttl) is (result is RenewalResult.OURS)

    def test_renewing_nothing_is_nothing(self, store: LeaseStore) -> None:
        """An empty batch has no results."""
        assert store.renew([]) == []

    def test_a_renewed_lease_outlives_its_first_ttl(self, store: LeaseStore, key: str) -> None:
        """The new ttl counts from the renewal."""
        call = make_call(key, ttl=self.short)
        assert acquired(store.acquire(call))
        assert store.renew([Renewal(key, call.token, self.ttl)]) == [RenewalResult.OURS]
        time.sleep(1.5 * self.short)
        assert held(store.acquire(make_call(key, ttl=self.ttl)))

    def test_renewal_never_cuts_a_longer_lease(self, store: LeaseStore, key: str) -> None:
        """A lease that was extended to an hour is not shortened."""
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        for ttl in (60 * self.ttl, self.ttl, self.short):
            assert store.renew([Renewal(key, call.token, ttl)]) == [RenewalResult.OURS]
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 50 * self.ttl

    def test_a_lost_lease_is_not_renewed(self, store: LeaseStore, key: str) -> None:
        """Once another token holds the key, the renewal says so, and extends nothing."""
        lost = make_call(key, ttl=self.short)
        assert acquired(store.acquire(lost))
        successor = make_call(key, ttl=self.ttl)
        wait_until(
            lambda: acquired(store.acquire(successor)), self.short + PATIENCE, "the lease to end"
        )
        assert store.renew([Renewal(key, lost.token, 9 * self.ttl)]) == [RenewalResult.OTHER]
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == successor.token
        assert holder.remaining <= self.ttl

    # -- release -----------------------------------------------------------------------------------

    def test_release_frees_the_key_at_once_and_once(self, store: LeaseStore, key: str) -> None:
        """The next request gets the lease; a second release returns ``False``."""
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        assert store.release(key, call.token)
        assert store.holder(key) is None
        assert not store.release(key, call.token)
        assert store.renew([Renewal(key, call.token, self.ttl)]) != [RenewalResult.OURS]
        assert acquired(store.acquire(make_call(key, ttl=self.ttl)))

    def test_a_stranger_cannot_release(self, store: LeaseStore, key: str) -> None:
        """Nor can a token that begins or ends like the holder's."""
        call = make_call(key, ttl=self.ttl)
        assert acquired(store.acquire(call))
        for token in (
            uuid4().hex,
            call.token[:-1],
            call.token[1:],
            call.token + "0",
        ):
            assert not store.release(key, token)
            assert store.renew([Renewal(key, token, 9 * self.ttl)]) == [RenewalResult.OTHER]
            assert held(store.acquire(make_call(key, token, ttl=self.ttl)))
        holder = store.holder(key)
        assert holder is not None
        assert holder.token == call.token
        assert holder.remaining <= self.ttl

    def test_releasing_an_unknown_key_is_no_error(self, store: LeaseStore, key: str) -> None:
        """It returns ``False``."""
        assert not store.release(key, uuid4().hex)

    # -- reading -----------------------------------------------------------------------------------

    def test_of_many_keys_those_that_are_held_are_returned(self, store: LeaseStore) -> None:
        """Free, unknown and expired keys are not; and the call changes nothing."""
        running, ending, freed, unknown = (fresh_key() for _ in range(4))
        calls = {
            key: make_call(key, ttl=self.short if key == ending else self.ttl)
            for key in (running, ending, freed)
        }
        for call in calls.values():
            assert acquired(store.acquire(call))
        assert store.release(freed, calls[freed].token)
        keys = [unknown, freed, running, ending]
        wait_until(lambda: store.held(keys) == {running}, PATIENCE, "only one key to be held")
        assert store.held([]) == set()
        assert store.release(running, calls[running].token)
        assert store.held(keys) == set()

    # -- everything at once ------------------------------------------------------------------------

    def test_an_unprotected_counter_is_exact(self, store: LeaseStore, key: str) -> None:
        """Eight threads read, yield and write under leases that are renewed, released and left to
        expire, and also renew and release too late.
        """
        fuzz = LeaseFuzz(store, key, ttl=self.ttl, short=self.short)
        with ThreadPoolExecutor(THREADS) as threads:
            written = sum(threads.map(fuzz.take_turns, range(THREADS)))
        assert written > THREADS
        assert fuzz.counter == written
