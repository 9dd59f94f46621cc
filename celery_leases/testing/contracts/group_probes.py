"""The contract of group stores for groups that are due for a probe: one probe at a time, whose
slot ends with its lease.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pytest

from celery_leases.decide.answers import (
    Acquired,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.testing.contracts.calls import acquired, held
from celery_leases.testing.contracts.group_case import (
    PATIENCE,
    GroupCase,
    admitted,
    closed,
    closing,
    found,
    freed,
    probe,
    probe_due,
    probing,
    shut,
    until_probe_due,
)
from celery_leases.testing.waits import wait_until

REQUESTS = 32
THREADS = 8
TURNS = 10


class GroupProbeContract(GroupCase):
    """Only the probe may start. Its success opens the group, and its failure closes the group. If
    it ends otherwise, the next request becomes the probe.
    """

    def test_one_of_many_requests_is_the_probe(self, store: MarkedLeaseStore, group: str) -> None:
        """Of 32 requests for different keys at once. The others get the token of the probe."""
        probe_due(store, group)
        calls = [self.call(group) for _ in range(REQUESTS)]
        together = Barrier(REQUESTS)

        def acquire(number: int) -> Acquired | Refused:
            together.wait(PATIENCE)
            return store.acquire(calls[number])

        with ThreadPoolExecutor(REQUESTS) as threads:
            answers = list(threads.map(acquire, range(REQUESTS)))
        probes = [
            call.token for call, answer in zip(calls, answers, strict=True) if probing(answer)
        ]
        assert len(probes) == 1
        assert [acquired(answer) for answer in answers].count(True) == 1
        for answer in answers:
            if not acquired(answer):
                assert isinstance(answer, Refused)
                assert answer.closed_group is not None
                assert answer.closed_group.probe_due
        closed_group = shut(store, self.call(group))
        assert closed_group.probe == probes[0] == found(store, group).probe
        assert closed_group.probe_due
        assert 0 < closed_group.blocked_for == closed_group.probe_for <= self.ttl

    def test_a_probe_that_asks_again_is_still_the_probe(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """The reply to its first try may have been lost. A longer time is not shortened."""
        probe_due(store, group)
        call = probe(store, self.call(group, ttl=2 * self.ttl))
        answer = store.acquire(call)
        assert acquired(answer)
        assert probing(answer)
        assert found(store, group).probe_for > self.ttl
        freed(store, group, call.token)
        answer = store.acquire(call)
        assert acquired(answer)
        assert not probing(answer)

    def test_the_slot_ends_by_itself(self, store: MarkedLeaseStore, group: str) -> None:
        """The slot of a dead probe ends after its ttl, and not before. The next request becomes the
        probe, and the group is unchanged.
        """
        probe_due(store, group)
        sent = time.monotonic()
        probe(store, self.call(group, ttl=self.short))
        call = self.call(group)
        wait_until(lambda: probing(store.acquire(call)), self.short + PATIENCE, "the slot to end")
        assert time.monotonic() - sent >= self.short * 0.99
        assert (found(store, group).in_a_row, found(store, group).probe) == (1, call.token)

    def test_the_slot_is_renewed_along_with_the_lease(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """If the renewal names the group. A longer time is never shortened."""
        probe_due(store, group)
        call = probe(store, self.call(group, ttl=self.short))
        for ttl in (2 * self.ttl, self.ttl):
            assert store.renew([Renewal(call.key.stored, call.token, ttl, slot=(group, 0))]) == [
                RenewalResult.OURS
            ]
        time.sleep(1.5 * self.short)
        closed_group = shut(store, self.call(group))
        assert closed_group.probe == call.token
        assert self.ttl < closed_group.probe_for <= 2 * self.ttl

    def test_a_renewal_makes_no_other_token_the_probe(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Nor does it close an open group, or renew the slot of another token."""
        probe_due(store, group)
        call = probe(store, self.call(group))
        other = admitted(store, self.call(None))
        gone = self.call(None)
        renewals = [
            Renewal(other.key.stored, other.token, 4 * self.ttl, slot=(group, 0)),
            Renewal(other.key.stored, other.token, 4 * self.ttl, slot=(f"{group}-open", 0)),
            Renewal(gone.key.stored, gone.token, 4 * self.ttl, slot=(group, 0)),
            Renewal(call.key.stored, call.token, 4 * self.ttl),
        ]
        assert store.renew(renewals) == [
            RenewalResult.OURS,
            RenewalResult.OURS,
            RenewalResult.MISSING,
            RenewalResult.OURS,
        ]
        assert found(store, group).probe == call.token
        assert found(store, group).probe_for <= self.ttl
        assert store.groups.get(f"{group}-open") is None

    def test_a_slot_given_back_is_free_for_the_next_request(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """An attempt that does not run the body gives the slot back. No other token can do so."""
        probe_due(store, group)
        call = probe(store, self.call(group))
        for token in (
            uuid4().hex,
            call.token[:-1],
            call.token[1:],
            call.token + "0",
        ):
            store.groups.release_slot(group, token)
        store.groups.release_slot(f"{group}-other", call.token)
        assert shut(store, self.call(group)).probe == call.token
        closed_group = freed(store, group, call.token)
        assert (closed_group.in_a_row, closed_group.probe_due, closed_group.probe) == (
            1,
            True,
            None,
        )
        probe(store, self.call(group))

    def test_a_request_that_is_refused_takes_no_slot(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """If the key is held, the group does not matter."""
        probe_due(store, group)
        call = admitted(store, self.call(None))
        assert held(store.acquire(self.call(group, key=call.key.stored)))
        assert found(store, group).probe is None
        probe(store, self.call(group))

    # -- how it ends -------------------------------------------------------------------------------

    def test_only_the_probe_opens_the_group(self, store: MarkedLeaseStore, group: str) -> None:
        """The success of a body that began before the group closed does not open it."""
        early = admitted(store, self.call(group))
        closed(store, group, 0.02)
        assert not store.groups.open(group, early.token)
        until_probe_due(store, group)
        assert not store.groups.open(group, early.token)
        call = probe(store, self.call(group))
        for token in (
            early.token,
            call.token[:-1],
            call.token[1:],
            call.token + "0",
            "",
        ):
            if token:
                assert not store.groups.open(group, token)
        assert store.groups.open(group, call.token)
        assert store.groups.get(group) is None
        for _ in range(3):
            admitted(store, self.call(group))
        assert not store.groups.open(group, call.token)

    def test_a_probe_that_has_lost_its_slot_does_not_open(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Another token has the slot now."""
        probe_due(store, group)
        lost = probe(store, self.call(group, ttl=self.short))
        call = self.call(group)
        wait_until(lambda: probing(store.acquire(call)), self.short + PATIENCE, "the slot to end")
        assert not store.groups.open(group, lost.token)
        store.groups.release_slot(group, lost.token)
        assert store.groups.close(group, closing(0.0), lost.token).in_a_row == 1
        assert found(store, group).probe == call.token
        assert store.groups.open(group, call.token)

    def test_the_probes_failure_is_the_next_trip(self, store: MarkedLeaseStore, group: str) -> None:
        """The same step frees the slot, so that the next request can probe once the group is
        due for a probe again.
        """
        probe_due(store, group)
        call = probe(store, self.call(group))
        closed_group = store.groups.close(group, closing(self.short), call.token)
        assert (closed_group.in_a_row, closed_group.probe, closed_group.closed_for) == (
            2,
            None,
            self.short,
        )
        seen = shut(store, self.call(group))
        assert (seen.in_a_row, seen.probe) == (2, None)
        assert 0 < seen.closed_for <= self.short
        until_probe_due(store, group)
        assert found(store, group).in_a_row == 2
        probe(store, self.call(group))

    @pytest.mark.parametrize("server_delay", [30.0, 90.0])
    def test_a_group_closed_during_a_probe_stays_closed(
        self, store: MarkedLeaseStore, group: str, server_delay: float
    ) -> None:
        """A late failure has closed it. The probe's success does not open it; the probe's failure
        is not counted, and frees the slot.
        """
        probe_due(store, group)
        call = probe(store, self.call(group))
        closed(store, group, 60.0)
        assert not store.groups.open(group, call.token)
        closed_group = store.groups.close(group, closing(server_delay), call.token)
        assert (closed_group.in_a_row, closed_group.probe) == (1, None)
        seen = found(store, group)
        assert (seen.in_a_row, seen.probe) == (1, None)
        assert max(60.0, server_delay) - 10 < seen.closed_for <= max(60.0, server_delay)

    def test_there_are_never_two_probes_at_once(self, store: MarkedLeaseStore, group: str) -> None:
        """Eight threads probe, fail and give back the slot, and also act with expired tokens."""
        probe_due(store, group)
        inside: list[str] = []
        in_a_row = 1
        until = time.monotonic() + 9 * PATIENCE

        def take_turns(seed: int) -> int:
            nonlocal in_a_row
            rand, former, failures = random.Random(seed), [uuid4().hex], 0
            for _ in range(TURNS):
                call = self.call(group)
                while not probing(store.acquire(call)):
                    assert time.monotonic() < until
                    time.sleep(rand.uniform(0.001, 0.01))
                inside.append(call.token)
                time.sleep(rand.uniform(0, 0.003))
                assert inside == [call.token]
                inside.clear()
                if rand.random() < 0.3:
                    failures += 1
                    store.groups.close(group, closing(0.005), call.token)
                else:
                    store.groups.release_slot(group, call.token)
                assert not store.groups.open(group, rand.choice(former))
                store.groups.release_slot(group, rand.choice(former))
                former.append(call.token)
            return failures

        with ThreadPoolExecutor(THREADS) as threads:
            failures = sum(threads.map(take_turns, range(THREADS)))
        assert found(store, group).in_a_row == in_a_row + failures
