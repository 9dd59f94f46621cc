"""The contract of group stores for closing, opening and listing groups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from uuid import uuid4

import pytest

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import ClosedGroup
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.testing.contracts.calls import acquired, make_call
from celery_leases.testing.contracts.group_case import (
    PATIENCE,
    POLICY,
    GroupCase,
    admitted,
    closed,
    closing,
    found,
    probe,
    probe_due,
    shut,
    until_probe_due,
)

FAILURES = 50
ODD = [
    "",
    "{x}",
    "}",
    "}:slots",
    "%",
    "%7D",
    "*",
    "[a-z]?",
    "'\"\\",
    " ",
    "ключ",
    "a\nb",
    "\0",
]
LONG = ["x" * 300, "x" * 299 + "y", "x" * 300 + "\0"]


class GroupClosingContract(GroupCase):
    """A failure closes a group for all keys. Later failures can only extend the time; they are not
    counted.
    """

    def test_an_open_group_refuses_no_request(self, store: MarkedLeaseStore, group: str) -> None:
        """There is no group and no probe."""
        assert store.groups.get(group) is None
        for _ in range(3):
            admitted(store, self.call(group))

    def test_a_closed_group_shuts_every_key_of_its_group(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """The answer shows why and for how long. The lease is not taken."""
        closed_group = closed(
            store, group, 60.0, reason="quota", rule="code:quota", message="no ü \0"
        )
        assert (closed_group.group, closed_group.in_a_row, closed_group.closed_for) == (
            group,
            1,
            60.0,
        )
        for _ in range(3):
            call = self.call(group)
            for seen in (shut(store, call), found(store, group)):
                shown = (seen.group, seen.in_a_row, seen.reason, seen.rule, seen.message)
                assert shown == (group, 1, "quota", "code:quota", "no ü \0")
                assert 50 < seen.closed_for <= 60
                assert not seen.probe_due
                assert (seen.probe, seen.probe_for) == (None, 0.0)
            assert store.holder(call.key.stored) is None
            assert acquired(store.acquire(make_call(call.key.stored, ttl=self.ttl)))

    def test_a_reason_alone_is_enough(self, store: MarkedLeaseStore, group: str) -> None:
        """Not every failure has a rule or a message."""
        closed(store, group, 60.0, reason="busy", rule=None, message="")
        seen = found(store, group)
        assert (seen.reason, seen.rule, seen.message) == ("busy", None, "")

    def test_groups_do_not_touch_each_other(self, store: MarkedLeaseStore, group: str) -> None:
        """Not even with special characters or long names."""
        names = [*(f"{group}{tail}" for tail in ODD), *(f"{tail}{group}{tail}" for tail in LONG)]
        for shutting in names[::2]:
            closed(store, shutting, 60.0, message=shutting)
        for number, name in enumerate(names):
            closed_group = store.groups.get(name)
            if number % 2:
                assert closed_group is None
                admitted(store, self.call(name))
            else:
                assert closed_group is not None
                assert closed_group.message == name
                assert shut(store, self.call(name)).message == name
        admitted(store, self.call(None))

    def test_a_group_is_no_key(self, store: MarkedLeaseStore, group: str) -> None:
        """A key that is named like a group or a probe slot is neither listed as a group nor
        changed with the group.
        """
        calls = [
            self.call(None, key=key) for key in (group, f"group:{group}", f"group:{group}}}:slots")
        ]
        for call in calls:
            admitted(store, call)
        probe_due(store, group)
        probe(store, self.call(group))
        assert store.groups.open(group)
        for call in calls:
            holder = store.holder(call.key.stored)
            assert holder is not None
            assert holder.token == call.token
        assert all(
            found.group != call.key.stored for found in store.groups.all(100_000) for call in calls
        )

    # -- how long, and how often -------------------------------------------------------------------

    def test_a_closed_group_is_extended_and_never_shortened(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """The reason is that of the failure that closes it longest. No further closing is
        counted.
        """
        closed(store, group, 100.0, reason="first")
        for server_delay, reason, lasts in (
            (50.0, "shorter", 100),
            (200.0, "longer", 200),
            (0.0, "now", 200),
        ):
            closed_group = closed(store, group, server_delay, reason=reason)
            for seen in (closed_group, found(store, group), shut(store, self.call(group))):
                assert lasts - 10 < seen.closed_for <= lasts
                assert seen.in_a_row == 1
                assert seen.reason == ("first" if lasts == 100 else "longer")

    def test_failures_at_the_same_time_close_it_once(
        self, store: MarkedLeaseStore, group: str
    ) -> None:
        """Of fifty failures with different delays and messages, the longest delay counts, and one
        closing in a row.
        """
        together = Barrier(FAILURES)

        def fail(number: int) -> ClosedGroup:
            together.wait(PATIENCE)
            return closed(store, group, 100.0 + number * 7 % FAILURES, message=f"request {number}")

        with ThreadPoolExecutor(FAILURES) as threads:
            closed_groups = list(threads.map(fail, range(FAILURES)))
        assert {closed_group.in_a_row for closed_group in closed_groups} == {1}
        for number, closed_group in enumerate(closed_groups):
            assert closed_group.closed_for >= 100 + number * 7 % FAILURES - 10
        seen = found(store, group)
        assert seen.in_a_row == 1
        assert 100 + FAILURES - 1 - PATIENCE < seen.closed_for <= 100 + FAILURES - 1

    def test_every_close_closes_it_for_longer(self, store: MarkedLeaseStore, group: str) -> None:
        """By the cooldown policy, if the server gave no delay."""
        policy = CooldownPolicy(self.short / 2, 2, 60, 0)
        token = uuid4().hex
        for in_a_row in (1, 2, 3):
            closed_group = store.groups.close(group, closing(policy=policy), token)
            assert (closed_group.in_a_row, closed_group.closed_for) == (
                in_a_row,
                policy.longest(in_a_row),
            )
            assert found(store, group).closed_for <= closed_group.closed_for
            until_probe_due(store, group)
            token = probe(store, self.call(group)).token

    @pytest.mark.parametrize("server_delay", [None, 60.0])
    def test_a_late_failure_counts_no_trip(
        self, store: MarkedLeaseStore, group: str, server_delay: float | None
    ) -> None:
        """A body that began before the group closed fails while another one probes. The group
        closes again, and the probe keeps its slot.
        """
        probe_due(store, group)
        call = probe(store, self.call(group))
        closed_group = closed(store, group, server_delay)
        assert (closed_group.in_a_row, closed_group.probe) == (1, call.token)
        seen = found(store, group)
        assert (seen.in_a_row, seen.probe) == (1, call.token)
        assert 50 < seen.closed_for <= POLICY.longest(1)
        assert 0 < seen.probe_for <= self.ttl
        assert shut(store, self.call(group)).in_a_row == 1

    # -- opening and listing -----------------------------------------------------------------------

    @pytest.mark.parametrize("probed", [True, False])
    def test_an_operator_opens_any_group(
        self, store: MarkedLeaseStore, group: str, probed: bool
    ) -> None:
        """Its closings and its probe are forgotten. Opening an open group changes nothing."""
        assert not store.groups.open(group)
        if probed:
            probe_due(store, group)
            token = probe(store, self.call(group)).token
            store.groups.close(group, closing(0.02), token)
            until_probe_due(store, group)
            probe(store, self.call(group))
            assert found(store, group).in_a_row == 2
        else:
            closed(store, group, 60.0)
        assert store.groups.open(group)
        assert store.groups.get(group) is None
        admitted(store, self.call(group))
        assert not store.groups.open(group)
        closed_group = closed(store, group, 60.0)
        assert (closed_group.in_a_row, closed_group.probe) == (1, None)
        assert found(store, group).in_a_row == 1

    def test_groups_that_are_not_open_are_listed(self, store: MarkedLeaseStore, group: str) -> None:
        """Those that are closed or due for a probe, once, by their names or shortened names."""
        names = [f"{group}{tail}" for tail in ODD if tail != "\0"]
        for number, name in enumerate(names):
            closed(store, name, 60.0 if number % 2 else 0.02, reason=name)
        long = group + "x" * 300
        closed(store, long, 60.0, reason=long)
        assert store.groups.open(names.pop())
        listed = [
            closed_group
            for closed_group in store.groups.all(100_000)
            if closed_group.reason.startswith(group)
        ]
        assert sorted(closed_group.reason for closed_group in listed) == sorted([*names, long])
        for closed_group in listed:
            assert closed_group.group == closed_group.reason or (
                closed_group.reason == long and len(closed_group.group) < len(long)
            )
            assert store.groups.open(closed_group.group)
        assert store.groups.get(long) is None
        for name in names[:3]:
            closed(store, name, 60.0)
        assert len(list(store.groups.all(2))) == 2
