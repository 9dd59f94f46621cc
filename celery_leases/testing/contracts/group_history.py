"""The contract of group stores that remember when groups were closed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

from celery_leases.groups.history import CLOSINGS_MAX, PastClosing
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.testing.contracts.group_case import (
    PATIENCE,
    GroupCase,
    closed,
    closing,
    probe,
    probe_due,
    until_probe_due,
)
from celery_leases.testing.waits import wait_until

FAILURES = 8
SECOND = 1.5
"""The maximum difference in seconds between the clocks of the store and of the test."""


def past(store: MarkedLeaseStore, group: str) -> list[PastClosing]:
    """The closings of a group."""
    return [*store.groups.history([group]).get(group, ())]


class GroupHistoryContract(GroupCase):
    """For every lease store whose ``groups`` have a history: the latest closing is the first."""

    def test_an_open_group_has_no_past(self, store: MarkedLeaseStore, group: str) -> None:
        """Without a closing nothing is remembered."""
        assert past(store, group) == []
        assert not store.groups.open(group)
        assert past(store, group) == []
        assert store.groups.history([]) == {}

    def test_a_closing_is_remembered_with_its_rule_and_its_time(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Also once the group is open again; then with the time of the opening."""
        began = time.time()
        closed(store, group, 60.0, reason="quota", rule="code:quota", message="secret")
        (first,) = past(store, group)
        assert (first.in_a_row, first.reason, first.rule) == (1, "quota", "code:quota")
        assert began - SECOND <= first.closed_at <= time.time() + SECOND
        assert abs(first.until - first.closed_at - 60.0) < SECOND
        assert first.opened_at is None
        assert store.groups.open(group)
        (opened,) = past(store, group)
        assert opened.opened_at is not None
        assert first.closed_at <= opened.opened_at <= time.time() + SECOND
        closed(store, group, 60.0, reason="again")
        assert [each.reason for each in past(store, group)] == ["again", "quota"]
        assert past(store, group)[1] == opened

    def test_the_time_at_which_a_probe_opens_the_group_is_remembered(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """A token that does not hold the slot opens nothing."""
        probe_due(store, group)
        call = probe(store, self.call(group))
        assert not store.groups.open(group, uuid4().hex)
        assert past(store, group)[0].opened_at is None
        assert store.groups.open(group, call.token)
        assert past(store, group)[0].opened_at is not None

    def test_every_close_is_a_closing_of_its_own(self, store: MarkedLeaseStore, group: str) -> None:
        """If the probe fails, the group closes for the second time in a row."""
        probe_due(store, group)
        token = probe(store, self.call(group)).token
        store.groups.close(group, closing(60.0, reason="probed"), token)
        found = past(store, group)
        assert [(each.in_a_row, each.reason) for each in found] == [
            (2, "probed"),
            (1, "rate_limited"),
        ]
        assert found[1].opened_at is None

    def test_a_closing_that_is_extended_is_one(self, store: MarkedLeaseStore, group: str) -> None:
        """Its beginning does not change. A failure with a shorter time changes nothing."""
        closed(store, group, 60.0, reason="first")
        (first,) = past(store, group)
        closed(store, group, 600.0, reason="longer")
        closed(store, group, 30.0, reason="shorter")
        (found,) = past(store, group)
        assert (found.closed_at, found.reason) == (first.closed_at, "longer")
        assert 540 < found.until - found.closed_at < 660

    def test_failures_at_the_same_time_are_one_closing(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Because they are one closing."""
        together = Barrier(FAILURES)

        def fail(number: int) -> None:
            together.wait(PATIENCE)
            closed(store, group, 100.0 + number)

        with ThreadPoolExecutor(FAILURES) as threads:
            list(threads.map(fail, range(FAILURES)))
        assert len(past(store, group)) == 1

    def test_only_the_last_closings_are_remembered(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """So the history of a group that closes often stays small."""
        for number in range(CLOSINGS_MAX + 2):
            closed(store, group, 60.0, reason=str(number))
            assert store.groups.open(group)
        found = past(store, group)
        assert [each.reason for each in found] == [
            str(number) for number in reversed(range(2, CLOSINGS_MAX + 2))
        ]

    def test_groups_are_listed_that_are_open_again(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """By the name of the group, or by a shortened name. No other group has their closings."""
        names = [f"{group}{tail}" for tail in ("", "{x}", "%7D", "}:past", "ключ")]
        for name in names:
            closed(store, name, 60.0, reason=name)
        assert store.groups.open(names[0])
        long = group + "x" * 300
        closed(store, long, 60.0, reason=long)
        listed = store.groups.history(limit=100_000)
        assert {name: [each.reason for each in listed[name]] for name in names} == {
            name: [name] for name in names
        }
        (stands,) = [name for name, each in listed.items() if each[0].reason == long]
        assert past(store, stands) == past(store, long) != []
        assert len(store.groups.history(limit=2)) == 2
        some = store.groups.history([names[1], f"{group}-other"])
        assert set(some) == {names[1]}

    def test_a_closing_after_one_that_ran_out_is_new(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """A body that began earlier fails when the group is already due for a probe."""
        closed(store, group, self.short)
        until_probe_due(store, group)
        wait_until(
            lambda: time.time() > past(store, group)[0].until, PATIENCE, "the closing to run out"
        )
        closed(store, group, 60.0, reason="late")
        assert [each.reason for each in past(store, group)] == ["late", "rate_limited"]
