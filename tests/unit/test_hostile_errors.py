"""Errors with any content are read: fast, and without imports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.errors import Cooldown, LeaseLost
from celery_leases.failures.classifier import Rules
from celery_leases.failures.error_facts import facts_of
from celery_leases.results import failure_of
from tests.unit.fake_errors import fake_error, http_error


class Hostile(Exception):
    """Every attribute raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("text")


class Liar:
    """Even its class cannot be asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Mocked(Exception):
    """Every attribute is there, and is a Mock."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock()


class Endless:
    """A collection without an end."""

    def items(self) -> Any:
        while True:
            yield "retry-after", "3"


ATTRIBUTES = [
    "status_code", "status", "code", "http_status", "response", "resp", "headers", "body", "json_body", "details",
    "content", "type", "error", "reason", "sqlstate", "pgcode", "orig", "errno", "retryable", "retry_after", "kwargs",
    "cause", "exceptions", "recipients", "smtp_code", "grpc_status_code", "connection_invalidated", "os_error",
]  # fmt: skip


def values() -> list[Any]:
    return [
        None, True, 0, -1, 429, 10**30, 1.5, float("nan"), "", "429", "text", b"\xff", b"{}", '{"code": "x"}', [], {},
        (), {"error": {"code": "x"}}, [("retry-after", "3")], {1: {2: 3}}, {"error": ValueError()}, [ValueError()],
        ValueError(), ValueError, Liar(), Mock(), MagicMock(), Endless(), object(), lambda: 5, timedelta(1),
        SimpleNamespace(status_code=500, headers=Endless()), iter([1]), range(10**9), Cooldown(5),
    ]  # fmt: skip


@given(st.dictionaries(st.sampled_from(ATTRIBUTES), st.sampled_from(range(len(values())))))
def test_no_value_of_an_attribute_breaks_the_reading(drawn: dict[str, int]) -> None:
    error = fake_error("shop.SMTPSoup", **{name: values()[index] for name, index in drawn.items()})
    facts = facts_of(error)
    judged = Rules.default().use(lambda *_: None).classify(error, 1e9)
    assert judged.why
    assert judged.delay is None or 0 < judged.delay <= 21_600
    assert facts.names[0] == "shop.SMTPSoup"
    assert facts.status is None or 100 <= facts.status <= 599
    assert all(type(code) is str for code in facts.codes)
    assert all(type(name) is type(value) is str for name, value in facts.headers.items())
    assert facts.retry_after is None or facts.retry_after > 0
    assert len(facts.chain) <= 16


@pytest.mark.parametrize(
    "make",
    [Hostile, Mocked, lambda: fake_error("shop.Error", response=Liar(), reason=Liar())],
    ids=["raising", "mocked", "lying"],
)
def test_hostile_errors_have_at_least_a_name(make: Any) -> None:
    assert facts_of(make()).names


def test_reading_five_errors_takes_few_calls() -> None:
    """Calls are counted, because a busy machine takes longer for each."""
    error: BaseException | None = None
    for _ in range(5):
        outer = http_error(
            429, {"error": {"code": "slow", "type": "limit"}}, retry_after="3", x_other="1"
        )
        outer.__cause__ = error
        error = outer
    assert error is not None
    facts_of(error)
    events: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _: events.update([event]))
    try:
        facts_of(error)
    finally:
        sys.setprofile(before)
    assert events["call"] + events["c_call"] < 5000


class Counting(Exception):
    """Counts how often each of its attributes is asked for."""

    def __init__(self) -> None:
        super().__init__("counting")
        object.__setattr__(self, "asked", Counter())

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return {"status": "UNAVAILABLE"}.get(name)


def test_each_attribute_is_read_once() -> None:
    error = Counting()
    assert facts_of(error).grpc == "UNAVAILABLE"
    del error.asked["__deepcopy__"]
    assert {name: times for name, times in error.asked.items() if times > 1} == {}
    assert error.asked["status"] == 1


def test_a_chain_of_slow_errors_is_read_for_a_second_and_then_left() -> None:
    now = 0.0

    class Slow(Exception):
        @property
        def status_code(self) -> int:
            nonlocal now
            now += 0.4
            return 429

    error: BaseException = Slow("the last")
    for _ in range(7):
        error, error.__cause__ = Slow("one before"), error
    judged = Rules.default().classify(error, 1e9, lambda: now)
    assert judged.rule == "rate-limited"
    assert now == pytest.approx(1.2)


@pytest.mark.parametrize(
    "kind",
    [SystemExit, KeyboardInterrupt, GeneratorExit, LeaseLost],
    ids=lambda kind: kind.__name__,
)
def test_nothing_that_an_attribute_raises_leaves_the_classifier(kind: type[BaseException]) -> None:
    class Raising(Exception):
        def __getattr__(self, name: str) -> Any:
            raise kind

        def __str__(self) -> str:
            raise kind

    class Holder:
        def __iter__(self) -> Any:
            raise kind

        def items(self) -> Any:
            raise kind

    for error in (
        Raising(),
        fake_error("shop.Error", response=Raising(), headers=Holder(), details=Holder()),
    ):
        assert Rules.default().classify(error, 1e9).rule == "anything-else"
    failure = failure_of(Raising())
    assert (failure.type.rpartition(".")[2], failure.message) == ("Raising", "")


LARGE = 30_000_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("x" * LARGE),
        lambda: ValueError("token=" * (LARGE // 6)),
        lambda: ValueError("://" * (LARGE // 3)),
        lambda: KeyError("é" * LARGE),
        lambda: ValueError("a", "x" * LARGE),
        lambda: ValueError({"rows": [{"a": "x" * LARGE}]}),
        lambda: ValueError(list(range(LARGE // 10))),
        lambda: ValueError(b"x" * LARGE),
    ],
    ids=["text", "secrets", "urls", "key", "two", "nested", "list", "bytes"],
)
def test_a_message_of_30_mb_costs_milliseconds(make: Any) -> None:
    error = make()
    begun = time.thread_time()
    failure, facts = failure_of(error), facts_of(error)
    assert time.thread_time() - begun < 0.25
    assert len(failure.message) <= 2000
    assert len(facts.message) <= 500
    assert failure.message.endswith("…")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(), ValueError("a"), ValueError("a", 1), ValueError(["a", {"b": (1, {2})}]), KeyError("total"),
        KeyError(), OSError(2, "No such file", "a.txt"), ValueError(None), ValueError(b"a"),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "why"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_short_message_is_that_of_python(error: Exception) -> None:
    assert failure_of(error).message == str(error)


ALONE = """
import sys
from celery_leases.failures.classifier import Rules
before = set(sys.modules)
class RateLimitError(Exception):
    __module__ = "openai"
    status_code = 429
print(Rules.default().classify(RateLimitError(), 1e9).rule)
print(*sorted({name.split(".")[0] for name in sys.modules} & LIBRARIES))
print(*sorted(set(sys.modules) - before))
""".replace(
    "LIBRARIES",
    repr({"openai", "httpx", "requests", "botocore", "grpc", "stripe", "aiohttp", "anthropic"}),
)


def test_no_client_library_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "rate-limited\n\n\n"
