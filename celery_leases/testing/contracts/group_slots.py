"""The contract of group stores with limits and rates: slots that are leases, even begins, and turns
in the order of arrival.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import Any

import pytest

from celery_leases.call import Call
from celery_leases.decide.answers import Acquired, Refusal, Refused, Renewal, RenewalResult
from celery_leases.groups.slots import AHEAD, OVERTAKING, Ask, Room
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.testing.contracts.calls import acquired, held, why
from celery_leases.testing.contracts.group_case import GroupCase, closed, found, probe_due, probing
from celery_leases.testing.waits import wait_until

PATIENCE = 10.0
REQUESTS = 24
THREADS = 8
TURNS = 8
EARLY = 1.0
"""A time before every other one, in milliseconds."""


class GroupSlotsContract(GroupCase):
    """At most ``limit`` attempts of a group hold a slot, and begins are ``pause`` apart. A refused
    call has changed nothing.
    """

    def asking(self, group: str, limit: int = 0, pause: float = 0.0, **more: Any) -> Call:
        """A request for a new key in *group*, with a limit or a pause in milliseconds."""
        since, worker = more.pop("since", 0.0), more.pop("worker", "")
        return self.call(group, ask=Ask(limit, pause, since, worker), **more)

    # -- the limit ---------------------------------------------------------------------------------

    def test_as_many_as_the_limit_get_a_slot(self, store: MarkedLeaseStore, group: str) -> None:
        """Of many requests at once. The others hold no lease, and learn how many run."""
        calls = [self.asking(group, 3) for _ in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as threads:
            answers = list(threads.map(store.acquire, calls))
        assert [acquired(answer) for answer in answers].count(True) == 3
        for call, answer in zip(calls, answers, strict=True):
            if not acquired(answer):
                assert (full(answer).running, full(answer).limit) == (3, 3)
                assert store.holder(call.key.stored) is None
        assert acquired(store.acquire(self.call(group)))
        assert acquired(store.acquire(self.asking(f"{group}}}:slots", 1)))

    def test_a_slot_is_freed_by_its_token_alone(self, store: MarkedLeaseStore, group: str) -> None:
        """Then the next request gets it."""
        call = self.asking(group, 1)
        assert acquired(store.acquire(call))
        for name, token in ((group, call.token + "0"), (group, ""), (group + "x", call.token)):
            store.groups.release_slot(name, token)
            assert full(store.acquire(self.asking(group, 1))).running == 1
        store.groups.release_slot(group, call.token)
        wait_until(lambda: acquired(store.acquire(self.asking(group, 1))), PATIENCE, "the slot")

    def test_a_request_that_asks_again_has_one_slot(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """The reply to its first try may have been lost."""
        call = self.asking(group, 1)
        for _ in range(3):
            assert acquired(store.acquire(call))
        assert acquired(store.acquire(self.asking(group, 2))) is False
        assert len(store.groups.slots([group])[group][0].held) == 1

    def test_a_slot_ends_by_itself_and_not_before(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """That of a dead process, after its ttl."""
        began = time.monotonic()
        assert acquired(store.acquire(self.asking(group, 1, ttl=self.short)))
        after = self.asking(group, 1)
        wait_until(lambda: acquired(store.acquire(after)), PATIENCE, "the slot to end")
        assert time.monotonic() - began >= self.short * 0.99

    def test_a_slot_is_renewed_with_its_lease(self, store: MarkedLeaseStore, group: str) -> None:
        """A longer time is not cut. A slot that the store has lost is written again: the body
        runs.
        """
        call = self.asking(group, 1, ttl=self.short)
        assert acquired(store.acquire(call))
        for ttl in (2 * self.ttl, self.short):
            renewal = Renewal(call.key.stored, call.token, ttl, slot=(group, 1))
            assert store.renew([renewal]) == [RenewalResult.OURS]
        time.sleep(1.5 * self.short)
        assert why(store.acquire(self.asking(group, 1))) is Refusal.FULL
        store.groups.release_slot(group, call.token)
        store.renew([Renewal(call.key.stored, call.token, self.ttl, slot=(group, 1))])
        assert why(store.acquire(self.asking(group, 1))) is Refusal.FULL

    @pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3)])
    def test_the_smallest_limit_counts(
        self, store: MarkedLeaseStore, group: str, first: int, second: int
    ) -> None:
        """That of a running body, and that of the request."""
        assert acquired(store.acquire(self.asking(group, first)))
        assert full(store.acquire(self.asking(group, second))).limit == 1

    def test_a_refused_request_takes_no_slot(self, store: MarkedLeaseStore, group: str) -> None:
        """If its key is held, or its group is closed."""
        call = self.call(None)
        assert acquired(store.acquire(call))
        assert held(store.acquire(self.asking(group, 1, key=call.key.stored)))
        closed(store, group, 60.0)
        assert why(store.acquire(self.asking(group, 1))) is Refusal.CLOSED
        store.groups.open(group)
        assert acquired(store.acquire(self.asking(group, 1)))

    def test_a_full_group_has_no_probe(self, store: MarkedLeaseStore, group: str) -> None:
        """A request that gets no slot leaves the group due for a probe; the next one may probe."""
        early = self.asking(group, 1)
        assert acquired(store.acquire(early))
        probe_due(store, group)
        assert why(store.acquire(self.asking(group, 1))) is Refusal.FULL
        assert found(store, group).probe is None
        store.groups.release_slot(group, early.token)
        late = self.asking(group, 1)
        wait_until(lambda: probing(store.acquire(late)), PATIENCE, "the probe")

    def test_there_are_never_more_than_the_limit(self, store: MarkedLeaseStore, group: str) -> None:
        """Threads take turns, renew, free twice, and free with expired tokens."""
        running: set[str] = set()
        lock, most, until = Lock(), [0], time.monotonic() + 9 * PATIENCE

        def take_turns(seed: int) -> None:
            rand, former = random.Random(seed), ["x"]
            for _ in range(TURNS):
                call = self.asking(group, 3)
                while not acquired(store.acquire(call)):
                    assert time.monotonic() < until
                    time.sleep(rand.uniform(0.001, 0.01))
                with lock:
                    running.add(call.token)
                    most.append(len(running))
                time.sleep(rand.uniform(0, 0.005))
                if rand.random() < 0.5:
                    store.renew([Renewal(call.key.stored, call.token, 9.0, slot=(group, 3))])
                with lock:
                    running.remove(call.token)
                for token in (call.token, call.token, rand.choice(former)):
                    store.groups.release_slot(group, token)
                former.append(call.token)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(take_turns, range(THREADS)))
        assert max(most) <= 3
        assert store.groups.slots([group])[group][0].held == {}

    # -- the rate ----------------------------------------------------------------------------------

    def test_begins_are_apart(self, store: MarkedLeaseStore, group: str) -> None:
        """Requests at once get the turns of the next quarter of a second; others learn when the
        next one is.
        """
        pause = AHEAD / 2
        answers: list[Acquired | Refused] = []
        sent = time.monotonic()
        while all(map(acquired, answers)):
            answers.append(store.acquire(self.asking(group, pause=pause)))
        took = time.monotonic() - sent
        starts = [answer.starts_in for answer in answers[:-1] if isinstance(answer, Acquired)]
        assert starts[0] == 0.0
        for one, other in pairwise(starts):
            assert pause / 1000 - took - 0.01 <= other - one <= pause / 1000 + 0.01
        assert max(starts) <= AHEAD / 1000 + 0.001
        wait = full(answers[-1]).wait
        assert AHEAD / 1000 < wait + 0.001 <= (AHEAD + pause) / 1000 + 0.002
        time.sleep(max(0.0, wait - AHEAD / 1000 + 0.01))
        assert acquired(store.acquire(self.asking(group, pause=pause)))

    @pytest.mark.parametrize("limit", [0, 9])
    def test_a_request_that_asks_again_begins_no_sooner(
        self, store: MarkedLeaseStore, group: str, limit: int
    ) -> None:
        """The reply, with the time until its turn, may have been lost."""
        pause = AHEAD / 2
        assert acquired(store.acquire(self.asking(group, limit, pause)))
        call, sent = self.asking(group, limit, pause), time.monotonic()
        first, again = store.acquire(call), store.acquire(call)
        took = time.monotonic() - sent
        assert isinstance(first, Acquired)
        assert isinstance(again, Acquired)
        assert 0 < first.starts_in <= again.starts_in + took + 0.002

    def test_the_longest_pause_counts(self, store: MarkedLeaseStore, group: str) -> None:
        """That after the last begin, and that of the request."""
        assert acquired(store.acquire(self.asking(group, pause=60_000.0)))
        assert full(store.acquire(self.asking(group, pause=1.0))).wait > 50.0
        assert acquired(store.acquire(self.asking(f"{group}-2", pause=1.0)))
        assert full(store.acquire(self.asking(f"{group}-2", pause=60_000.0))).wait > 50.0

    def test_a_limit_and_a_rate_both_count(self, store: MarkedLeaseStore, group: str) -> None:
        """The request that gets no turn takes no slot."""
        assert acquired(store.acquire(self.asking(group, 3, pause=60_000.0)))
        assert why(store.acquire(self.asking(group, 3, pause=60_000.0))) is Refusal.FULL
        assert len(store.groups.slots([group])[group][0].held) == 1

    # -- the waiting list --------------------------------------------------------------------------

    def test_earlier_calls_of_another_worker_come_first(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Those that came at about the same time, and those of the own worker, do not."""
        asked = store.groups.room({group: Ask(1, since=EARLY, worker="first")})[group]
        assert (asked.places, asked.limit, asked.running) == (1, 1, 0)
        assert full(store.acquire(self.asking(group, 1, worker="second"))).running == 0
        late: dict[str, Any] = {"since": EARLY + OVERTAKING + 1, "worker": "second"}
        assert store.groups.room({group: Ask(1, **late)})[group].places == 0
        assert why(store.acquire(self.asking(group, 1, **late))) is Refusal.FULL
        assert acquired(store.acquire(self.asking(group, 2, **late)))
        store.groups.room({group: Ask(2, worker="first")})
        # The call that got its slot has left the waiting list too.
        assert acquired(store.acquire(self.asking(group, 2, worker="third")))

    def test_the_place_of_a_dead_worker_ends(self, store: MarkedLeaseStore, group: str) -> None:
        """So that it does not hold up other calls."""
        store.groups.room({group: Ask(1, since=EARLY, worker="dead")})
        call = self.asking(group, 1, worker="alive")
        assert why(store.acquire(call)) is Refusal.FULL
        wait_until(lambda: acquired(store.acquire(call)), PATIENCE, "the place to end")

    def test_slots_are_listed(self, store: MarkedLeaseStore, group: str) -> None:
        """With their tokens, until nothing of the group counts."""
        call = self.asking(group, 2)
        store.acquire(call)
        (listed, now), *_ = store.groups.slots([group]).values()
        assert [*listed.held] == [call.token]
        assert 0 < listed.held[call.token][0] - now <= self.ttl * 1000
        assert group in store.groups.slots(None, 100_000)
        store.groups.release_slot(group, call.token)
        wait_until(
            lambda: group not in store.groups.slots(None, 100_000), PATIENCE, "the end of the group"
        )


def full(answer: Acquired | Refused) -> Room:
    """The room of the full group that refuses a call."""
    assert isinstance(answer, Refused), answer
    assert answer.why is Refusal.FULL, answer
    assert answer.room is not None
    return answer.room
