"""The contract of mark stores: subclass it, and override the fixture ``marks``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from celery_leases.decide.copies import UNCOPIED, callbacks_mark, waiter_mark
from celery_leases.stores.interfaces import MarkStore, WaiterStore
from celery_leases.testing.contracts.calls import fresh_key
from celery_leases.testing.waits import wait_until

THREADS = 8
PATIENCE = 10.0
HOUR = 3_600_000_000
"""In microseconds, as orders are."""


class MarkStoreContract:
    """For every ``MarkStore``. ``ttl`` is longer than a test; ``short`` is a time that tests
    wait. Both are seconds.
    """

    ttl = 15.0
    short = 0.4

    @pytest.fixture
    def marks(self) -> MarkStore:
        """The store under test; override this."""
        raise NotImplementedError("override the fixture `marks` with a mark store")

    @pytest.fixture
    def key(self) -> str:
        """A stored key of the test's own."""
        return fresh_key()

    @pytest.mark.parametrize("value", ["x", "", "two words", "ключ\n{}%"])
    def test_a_mark_is_read_as_it_was_set(self, marks: MarkStore, key: str, value: str) -> None:
        """Any text."""
        assert marks.mark(key, "waiter") is None
        assert marks.swap_mark(key, "waiter", None, value, self.ttl)
        assert marks.mark(key, "waiter") == value

    def test_a_mark_is_changed_only_from_the_expected_value(
        self, marks: MarkStore, key: str
    ) -> None:
        """Not if the expected value is different, or if no mark is expected."""
        assert marks.swap_mark(key, "waiter", None, "a", self.ttl)
        for expected in (None, "b", "", "A", "a "):
            assert not marks.swap_mark(key, "waiter", expected, "c", self.ttl)
            assert marks.mark(key, "waiter") == "a"
        assert marks.swap_mark(key, "waiter", "a", "c", self.ttl)
        assert marks.mark(key, "waiter") == "c"

    def test_an_empty_mark_is_not_an_absent_one(self, marks: MarkStore, key: str) -> None:
        """An expected ``None`` does not match an empty text."""
        assert marks.swap_mark(key, "waiter", None, "", self.ttl)
        assert not marks.swap_mark(key, "waiter", None, "a", self.ttl)
        assert marks.swap_mark(key, "waiter", "", "a", self.ttl)

    def test_an_absent_mark_is_set_whatever_was_expected(self, marks: MarkStore, key: str) -> None:
        """The expected mark may have expired."""
        assert marks.swap_mark(key, "waiter", "gone", "a", self.ttl)
        assert marks.mark(key, "waiter") == "a"

    def test_setting_the_same_value_again_counts(self, marks: MarkStore, key: str) -> None:
        """The reply to the first try may have been lost."""
        assert marks.swap_mark(key, "waiter", None, "a", self.ttl)
        assert marks.swap_mark(key, "waiter", None, "a", self.ttl)

    def test_marks_end_by_themselves(self, marks: MarkStore, key: str) -> None:
        """Afterwards a mark is set as if there had been none."""
        assert marks.swap_mark(key, "waiter", None, "a", self.short)
        wait_until(
            lambda: marks.mark(key, "waiter") is None, self.short + PATIENCE, "the mark to end"
        )
        assert marks.swap_mark(key, "waiter", None, "b", self.ttl)
        assert marks.mark(key, "waiter") == "b"

    def test_swapping_sets_the_time_anew(self, marks: MarkStore, key: str) -> None:
        """The new ttl counts, also if it is shorter."""
        assert marks.swap_mark(key, "waiter", None, "a", self.ttl)
        assert marks.swap_mark(key, "waiter", "a", "b", self.short)
        wait_until(
            lambda: marks.mark(key, "waiter") is None, self.short + PATIENCE, "the mark to end"
        )

    def test_names_and_keys_do_not_touch_each_other(self, marks: MarkStore, key: str) -> None:
        """Not even with special characters."""
        names = [
            (f"{key}{tail}", name)
            for tail in ("", "}:mark:a", "%7D")
            for name in ("a", "a}:mark:a", "a%7D:mark:a", "")
        ]
        for number, (stored_key, name) in enumerate(names):
            assert marks.swap_mark(stored_key, name, None, str(number), self.ttl)
        assert [marks.mark(*name) for name in names] == [
            str(number) for number in range(len(names))
        ]

    @pytest.mark.parametrize("call", ["1-2", "{a}/b", "new\nline"])
    def test_the_calls_that_wait_for_a_key_are_found(
        self, marks: MarkStore, key: str, call: str
    ) -> None:
        """Only those of that key, and not those that have ended."""
        if not isinstance(marks, WaiterStore):
            pytest.skip("this store does not find marks")
        copy = str(UNCOPIED.after("a" * 32))
        for of_key, name, value in (
            (key, waiter_mark(call, 0), copy),
            (key, waiter_mark(call, 1, 1_700_000_000_000_000), copy),
            (key, waiter_mark("ended", 0), "over"),
            (key, callbacks_mark("other"), copy),
            (f"{key}*", waiter_mark("longer", 0), copy),
            (f"*{key[1:]}", waiter_mark("pattern", 0), copy),
        ):
            assert marks.swap_mark(of_key, name, None, value, self.ttl)
        assert marks.waiting(key) == [call]
        assert marks.waiting(f"*{key[1:]}") == ["pattern"]

    def test_each_call_has_a_higher_order_than_those_before(
        self, marks: MarkStore, key: str
    ) -> None:
        """It is a time of the store, also for calls of many threads at once."""
        assert (marks.burst(key).newest, marks.burst(key).first) == (0, 0)
        first = marks.new_order(key)
        with ThreadPoolExecutor(THREADS) as threads:
            orders = list(threads.map(lambda _: marks.new_order(key), range(THREADS)))
        assert len({first, *orders}) == THREADS + 1
        assert min(orders) > first
        burst = marks.burst(key)
        assert burst.newest == max(orders)
        assert abs(burst.first - first) < 1_000_000
        assert 0 <= burst.now - burst.newest < 60_000_000
        assert marks.burst(f"{key}*").newest == 0
        assert marks.new_order(key) > burst.newest

    def test_orders_rise_although_the_clock_was_set_back(self, marks: MarkStore, key: str) -> None:
        """Then the newest call seems to come from the future, and the next ones follow it."""
        ahead = marks.burst(key).now + HOUR
        marks.note_order(key, ahead)
        orders = [marks.new_order(key) for _ in range(3)]
        assert ahead < orders[0] < orders[1] < orders[2] < ahead + HOUR
        assert (marks.burst(key).newest, marks.burst(key).first) == (orders[2], ahead)

    def test_a_given_order_is_noted_unless_a_newer_one_is(self, marks: MarkStore, key: str) -> None:
        """The order of a call that had none when it was published. One that does not come is
        replaced, unless a newer one was noted since.
        """
        marks.note_order(key, 7)
        assert (marks.burst(key).newest, marks.burst(key).first) == (7, 7)
        for order in (9, 8):
            marks.note_order(key, order)
            assert (marks.burst(key).newest, marks.burst(key).first) == (9, 7)
        for missing, newest in ((10, 9), (9, 8)):
            marks.note_order(key, 8, missing)
            assert (marks.burst(key).newest, marks.burst(key).first) == (newest, 7)
        assert marks.new_order(key) == marks.burst(key).newest > 9

    def test_a_run_of_the_newest_call_ends_its_burst(self, marks: MarkStore, key: str) -> None:
        """The next call is the first of another one."""
        marks.end_burst(key, 1)
        assert marks.burst(key).newest == 0
        older, newest = marks.new_order(key), marks.new_order(key)
        before = marks.burst(key).now
        marks.end_burst(key, older)  # while a newer call waits
        assert marks.burst(key).newest == newest
        assert marks.burst(key).first >= before
        marks.end_burst(key, newest)
        assert (marks.burst(key).newest, marks.burst(key).first) == (newest, 0)
        later = marks.new_order(key)
        assert abs(marks.burst(key).first - later) < 1_000_000

    def test_one_of_many_at_once_sets_it(self, marks: MarkStore, key: str) -> None:
        """Of eight threads that expect the same value, one sets the mark."""
        assert marks.swap_mark(key, "waiter", None, "start", self.ttl)
        together = Barrier(THREADS)

        def swap(number: int) -> bool:
            together.wait(PATIENCE)
            return marks.swap_mark(key, "waiter", "start", f"nonce-{number}", self.ttl)

        with ThreadPoolExecutor(THREADS) as threads:
            assert sum(threads.map(swap, range(THREADS))) == 1
