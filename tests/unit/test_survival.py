"""``assert_survives_crashes``: finds a planted double charge in naive tasks, and passes good
ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from celery_leases import LeasedTask, testing
from celery_leases.testing.kit import LeaseKit


class Bank:
    """The other side; it recognises a repetition by its key, if it is given one."""

    def __init__(self) -> None:
        self.payments: list[tuple[int, str | None]] = []

    def charge(self, order: int, key: str | None = None) -> str:
        """Charge once for each key, and each time without one."""
        if key is None or (order, key) not in self.payments:
            self.payments.append((order, key))
        return f"payment {order}"

    async def charge_async(self, order: int) -> str:
        await asyncio.sleep(0)
        self.payments.append((order, None))
        return f"payment {order}"

    def find(self, key: str) -> str | None:
        return next((f"payment {order}" for order, paid in self.payments if paid == key), None)


class Post:
    """Called by its class and by its instances."""

    sent: ClassVar[list[int]] = []

    @staticmethod
    def static(order: int) -> None:
        Post.sent.append(order)

    @classmethod
    def of_class(cls, order: int) -> None:
        cls.sent.append(order)


bank = Bank()
engine: Engine = create_engine("sqlite://")
rows: list[int] = []

# -- naive ones: each charges twice after some crash -----------------------------------------------


def charges_directly(self: Any, order: int) -> str:
    return bank.charge(order)


def ignores_the_idempotency_key(self: Any, order: int) -> Any:
    """It declares that the provider dedupes, but sends no idempotency key."""
    return self.lease.effect("charge", lambda _: bank.charge(order), uncertain="rerun").value


def names_the_effect_by_the_attempt(self: Any, order: int) -> Any:
    """Each attempt has an effect of its own."""
    name = f"charge-{self.lease.attempt}"
    return self.lease.effect(name, lambda key: bank.charge(order, key=key), uncertain="rerun").value


def remembers_it_too_late(self: Any, order: int) -> Any:
    """Between the charge and the saved progress it dies."""
    if not self.lease.progress:
        bank.charge(order)
        self.lease.save_progress("charged")
    return order


def saves_every_second_item(self: Any, order: int) -> Any:
    """A killed process charges the items since the last save again."""
    for item in self.lease.each([1, 2, 3, 4], every=2):
        bank.charge(order * 10 + item)
    return order


def makes_a_new_key_each_time(self: Any, order: int) -> Any:
    """The other side would dedupe, by a key that is never the same."""
    return bank.charge(order, key=uuid4().hex)


def charges_in_a_thread(self: Any, order: int) -> str:
    """The thread knows neither the lease nor the body."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(bank.charge, order).result()


def charges_asynchronously(self: Any, order: int) -> str:
    """It is called when it is awaited."""
    return asyncio.run(bank.charge_async(order))


NAIVE = {
    charges_directly: "return bank.charge(order)",
    ignores_the_idempotency_key: "bank.charge(order), uncertain",
    names_the_effect_by_the_attempt: "bank.charge(order, key=key)",
    remembers_it_too_late: "        bank.charge(order)",
    saves_every_second_item: "bank.charge(order * 10 + item)",
    makes_a_new_key_each_time: "key=uuid4().hex",
    charges_in_a_thread: "threads.submit(bank.charge, order).result()",
    charges_asynchronously: "asyncio.run(bank.charge_async(order))",
}

# -- good ones -------------------------------------------------------------------------------------


def passes_the_key_on(self: Any, order: int) -> Any:
    return self.lease.effect(
        "charge", lambda key: bank.charge(order, key=key), uncertain="rerun"
    ).value


def looks_it_up(self: Any, order: int) -> Any:
    """What is in doubt is asked for."""
    return self.lease.effect(
        "charge", lambda key: bank.charge(order, key=key), verify=bank.find
    ).value


def has_a_key_of_its_own(self: Any, order: int) -> Any:
    """Stable, and made of the arguments."""
    return bank.charge(order, key=f"order-{order}")


def stops_in_doubt(self: Any, order: int) -> Any:
    return self.lease.effect("charge", lambda _: bank.charge(order)).value


def commits_with_its_rows(self: Any, order: int) -> Any:
    """The done record commits with the rows, or neither does."""
    reply = self.lease.effect("charge", lambda key: bank.charge(order, key=key), uncertain="rerun")
    with Session(engine) as session, session.begin():
        session.execute(text("INSERT INTO payments VALUES (:number)"), {"number": order})
        return self.lease.complete(reply.value, session)


def charges_each_item_once(self: Any, order: int) -> Any:
    """Each with an effect of its own."""
    for item in self.lease.each([1, 2, 3], every=2):
        name = f"charge-{item}"
        self.lease.effect(
            name, lambda key, item=item: bank.charge(item, key=key), uncertain="rerun"
        )
    return order


GOOD = (
    passes_the_key_on, looks_it_up, has_a_key_of_its_own, stops_in_doubt, commits_with_its_rows,
    charges_each_item_once,
)  # fmt: skip


@pytest.fixture
def kit() -> Iterator[LeaseKit]:
    """The kit of an app, with the bank as its outside."""
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    with testing.leases(app) as kit:
        testing.watch(f"{__name__}.bank.charge", by="key")
        testing.watch(f"{__name__}.bank.charge_async")

        @testing.on_reset
        def emptied() -> None:
            bank.payments.clear()
            with engine.begin() as connection:
                rows.extend(
                    number for (number,) in connection.execute(text("SELECT number FROM payments"))
                )
                connection.execute(text("DELETE FROM payments"))

        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS payments (number INTEGER)"))
        yield kit
    assert "charge" not in vars(bank)


def task_of(kit: LeaseKit, body: Callable[..., Any]) -> Any:
    """A leased task with that body."""
    task = kit.app.task(
        body,
        base=LeasedTask,
        bind=True,
        name=f"shop.{body.__name__}",
        lease_key="order:{order}",
        shared=False,
    )
    kit.app.finalize()
    return kit.app.tasks[task.name]


@pytest.mark.parametrize(
    ("body", "line"), NAIVE.items(), ids=lambda given: getattr(given, "__name__", "")
)
def test_a_double_charge_is_found_with_its_line(kit, body, line) -> None:
    with pytest.raises(AssertionError) as found:
        testing.assert_survives_crashes(task_of(kit, body), 7)
    said = str(found.value)
    assert said.startswith(
        f"shop.{body.__name__} does not survive each crash:\n  dead after:charge"
    )
    assert "charge" in said
    assert "attempt 1  test_survival.py:" in said
    assert "attempt 2  test_survival.py:" in said
    assert line.strip() in said


@pytest.mark.parametrize("body", GOOD, ids=lambda body: body.__name__)
def test_a_good_task_passes(kit: LeaseKit, body: Callable[..., Any]) -> None:
    points = testing.assert_survives_crashes(task_of(kit, body), 7)
    named = {point.partition("-")[0] for point in points}
    end = "commit" if body is commits_with_its_rows else "return"
    assert {"before:charge", "after:charge", f"before:{end}", f"after:{end}"} <= named
    if body is commits_with_its_rows:
        assert rows == [7] * (len(points) + 1)


def test_an_awaited_call_is_made_before_the_process_dies_after_it(kit: LeaseKit) -> None:
    task = task_of(kit, charges_asynchronously)
    testing.crash(task, 7, at="before:charge_async")
    assert bank.payments == []
    testing.reset()
    testing.crash(task, 7, at="after:charge_async")
    assert bank.payments == [(7, None)]


def test_a_task_without_watched_calls_is_refused(kit: LeaseKit) -> None:
    """A task whose external calls are not known would always pass."""
    outside = SimpleNamespace(send=lambda: None)

    def sends(self: Any, order: int) -> None:
        outside.send()

    task = task_of(kit, sends)
    with pytest.raises(AssertionError, match=r'watch\("shop.gateway.charge"\)'):
        testing.assert_survives_crashes(task, 7)
    outside.send = testing.external(outside.send)
    with pytest.raises(AssertionError, match="2 calls instead of 1"):
        testing.assert_survives_crashes(task, 7)


def test_a_task_that_does_not_end_is_reported(kit: LeaseKit) -> None:
    """One that cannot go on from what it has left, and one that never could."""

    def refuses_to_go_on(self: Any, order: int) -> str:
        if self.lease.attempt > 1:
            raise KeyError("unexpected")
        return bank.charge(order, key=f"order-{order}")

    with pytest.raises(
        AssertionError, match=r"dead before:charge: the key is cooling in the end: KeyError\('unexp"
    ):
        testing.assert_survives_crashes(task_of(kit, refuses_to_go_on), 7)

    def fails(self: Any, order: int) -> None:
        raise KeyError("at once")

    with pytest.raises(
        AssertionError, match=r"does not even end without a crash: KeyError\('at once'\)"
    ):
        testing.assert_survives_crashes(task_of(kit, fails), 7)


def test_state_that_is_not_restored_is_reported(kit: LeaseKit) -> None:
    """The later runs make no call, so that they show nothing."""
    seen: set[int] = set()

    def remembers_by_itself(self: Any, order: int) -> None:
        if order not in seen:
            bank.charge(order)
            seen.add(order)

    task = task_of(kit, remembers_by_itself)
    with pytest.raises(AssertionError) as found:
        testing.assert_survives_crashes(task, 7)
    for point in ("before:charge", "after:return"):
        assert (
            f"point {point} not reached: the task took another path this time; reset your own "
            "state in on_reset()"
        ) in str(found.value)
    testing.on_reset(seen.clear)
    with pytest.raises(AssertionError, match="dead after:charge: charge: 2 calls instead of 1"):
        testing.assert_survives_crashes(task, 7)


def test_a_lost_call_is_found(kit: LeaseKit) -> None:
    def saves_it_too_early(self: Any, order: int) -> None:
        if not self.lease.progress:
            self.lease.save_progress("charged")
            bank.charge(order)

    with pytest.raises(
        AssertionError, match=r"dead after:progress: charge\(7\): 0 calls instead of 1"
    ):
        testing.assert_survives_crashes(task_of(kit, saves_it_too_early), 7)


def test_one_item_twice_and_another_never_are_found(kit: LeaseKit) -> None:
    def goes_on_at_the_wrong_end(self: Any, order: int) -> None:
        for item in (1,) if self.lease.progress else (1, 2):
            bank.charge(item)
            self.lease.save_progress(item)

    with pytest.raises(AssertionError) as found:
        testing.assert_survives_crashes(task_of(kit, goes_on_at_the_wrong_end), 7)
    assert "dead after:progress: charge(1): 2 calls instead of 1\n    attempt 1" in str(found.value)
    assert "dead after:progress: charge(2): 0 calls instead of 1" in str(found.value)


def test_a_call_with_new_arguments_is_the_one_that_is_missing(kit: LeaseKit) -> None:
    numbers = iter(range(1000))
    outside = SimpleNamespace(send=testing.external(lambda *_: None))

    def sends_the_time(self: Any, order: int) -> None:
        self.lease.effect("send", lambda _: outside.send(order, next(numbers), object()))

    testing.assert_survives_crashes(task_of(kit, sends_the_time), 7)


def test_fewer_calls_with_new_arguments_are_lost_ones(kit: LeaseKit) -> None:
    numbers = iter(range(1000))

    def numbers_its_items(self: Any, order: int) -> None:
        for item in range(self.lease.progress or 0, 2):
            self.lease.save_progress(item + 1)
            bank.charge(next(numbers))

    with pytest.raises(
        AssertionError, match=r"dead after:progress: charge: 1 calls instead of 2\n    attempt"
    ):
        testing.assert_survives_crashes(task_of(kit, numbers_its_items), 7)


def test_calls_of_a_class_are_watched(kit: LeaseKit) -> None:
    before = {name: vars(Post)[name] for name in ("static", "of_class")}
    with testing.leases(kit.app):
        for name in before:
            testing.watch(f"{__name__}.Post.{name}")
            for owner in (Post, Post()):

                def sends(self: Any, order: int, name: str = name, owner: Any = owner) -> None:
                    getattr(owner, name)(order)

                with pytest.raises(AssertionError, match=f"{name}: 2 calls instead of 1"):
                    testing.assert_survives_crashes(task_of(kit, sends), 7)
                kit.app.tasks.pop("shop.sends")
    assert set(Post.sent) == {7}
    assert {name: vars(Post)[name] for name in before} == before
