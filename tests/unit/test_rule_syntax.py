"""What users may write in ``Rules.on``, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import permanent, retry
from celery_leases.failures.classifier import Rules
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import RpcError, caused, fake_class, fake_error, http_error

NOW = 1_800_000_000.0
STOP = permanent(operator=True)


def matches(error: BaseException, **conditions: Any) -> bool:
    """Whether a rule with these conditions is about *error*."""
    return Rules().on(**conditions, to=STOP).classify(error, NOW).action is STOP


# -- conditions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "met", "missed"),
    [
        (404, [404], [403, 405, 500]),
        ("5xx", [500, 555, 599], [499, 404]),
        ("4XX", [400, 499], [500]),
        (range(500, 503), [500, 502], [503]),
        ([404, "5xx"], [404, 500], [403]),
        ({404, 410}, [404, 410], [409]),
        ([range(400, 402), 404], [400, 401, 404], [402]),
    ],
    ids=stable_id,
)
def test_a_rule_may_be_about_statuses(status: Any, met: list[int], missed: list[int]) -> None:
    assert [matches(http_error(one), status=status) for one in met] == [True] * len(met)
    assert [matches(http_error(one), status=status) for one in missed] == [False] * len(missed)
    assert not matches(ValueError(), status=status)


def test_a_rule_may_be_about_codes() -> None:
    error = http_error(400, {"error": {"code": "card_declined", "type": "card_error"}})
    assert matches(error, code="card_declined")
    assert matches(error, code=["other", "card_error"])
    assert matches(error, code="card_*")
    assert not matches(error, code="card")
    assert not matches(error, code="Card_declined")


Family = fake_class("shop.errors.Declined", fake_class("shop.errors.ShopError", LookupError))


@pytest.mark.parametrize(
    "name",
    [
        "shop.errors.Declined", "shop.Declined", "Declined", "shop.errors.ShopError", "LookupError",
        "builtins.LookupError", Family, LookupError, [KeyError, "shop.errors.Declined"],
    ],
    ids=stable_id,
)  # fmt: skip
def test_a_rule_may_be_about_a_class_or_a_superclass(name: Any) -> None:
    assert matches(Family(), exc=name)
    assert matches(caused(RuntimeError(), Family()), exc=name)


@pytest.mark.parametrize(
    "name",
    ["errors.Declined", "shop.error.Declined", "declined", "shop", KeyError, "builtins.Declined"],
)
def test_a_name_that_is_only_similar_is_another_one(name: Any) -> None:
    assert not matches(Family(), exc=name)


def test_a_builtin_class_is_not_every_class_of_that_name() -> None:
    error = fake_error("redis.exceptions.TimeoutError")
    assert matches(error, exc="TimeoutError")
    assert not matches(error, exc=TimeoutError)
    assert matches(TimeoutError(), exc=TimeoutError)


def test_a_rule_may_be_about_databases_grpc_headers_and_texts() -> None:
    busy = fake_error("psycopg.errors.LockNotAvailable", sqlstate="55P03")
    assert matches(busy, sqlstate="55")
    assert matches(busy, sqlstate=["40", "55P03"])
    assert not matches(busy, sqlstate="5P")
    assert matches(RpcError("NOT_FOUND"), grpc="NOT_FOUND")
    assert matches(RpcError("NOT_FOUND"), grpc=["ABORTED", "NOT_FOUND"])
    assert not matches(RpcError("NOT_FOUND"), grpc="ABORTED")
    assert matches(http_error(500, x_shop_closed="yes"), header="X-Shop-Closed")
    assert not matches(http_error(500), header="X-Shop-Closed")
    assert matches(ValueError("draft 17 is not ready"), message=r"draft \d+")
    assert matches(ValueError("Draft"), message=re.compile("draft", re.IGNORECASE))
    assert not matches(ValueError("Draft"), message="draft")


def test_a_text_is_searched_without_its_secrets() -> None:
    assert not matches(ValueError("token=abc123"), message="abc123")


def test_all_that_is_given_must_be_met_by_some_error_of_the_chain() -> None:
    error = caused(fake_error("shop.errors.Failed"), http_error(404))
    assert matches(error, exc="shop.errors.Failed", status=404)
    assert not matches(error, exc="shop.errors.Failed", status=403)
    assert not matches(http_error(404), exc="shop.errors.Failed", status=404)


# -- what is refused -------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {},
    *({"status": value} for value in (42, 1000, 99, 600, "6xx", "0xx", "404", "", [], (), range(0), range(90, 110))),
    *({"status": value} for value in (True, 4.04, [404, 1000], [404, None], [[404]], object())),
    *({"code": value} for value in ("", " ", "*", [], 5, ["a", ""], ["a", 5], True)),
    *({"exc": value} for value in ("", "1x", "a b", "a.", ".a", [], 5, int, ["a", 5], ValueError(), [int])),
    *({"exc": value} for value in (Exception, BaseException, "Exception", ["Declined", Exception])),
    *({"sqlstate": value} for value in ("", "400011", "4000a", 40001, [], ["40", ""])),
    *({"grpc": value} for value in ("", "not_found", "OK", 5, [], ["NOT_FOUND", "X"])),
    *({"header": value} for value in ("", "two words", "x:", 5, ["retry-after"])),
    *({"message": value} for value in ("", "(", "[a", 5, b"x", ["x"])),
]  # fmt: skip


@pytest.mark.parametrize("conditions", WRONG, ids=stable_id)
def test_a_rule_that_can_never_match_is_refused_when_it_is_written(conditions) -> None:
    with pytest.raises(LeaseConfigurationError, match=r"^Rules\.on: ") as refused:
        Rules.default().on(**conditions, to=permanent())
    for name, value in conditions.items():
        assert f"{name}={value!r} is not usable; write " in str(refused.value)


@pytest.mark.parametrize(
    "to", [None, "soon", "", -1, -1.5, float("nan"), float("inf"), True, False, [], retry, object()]
)
def test_what_is_done_must_be_something(to: Any) -> None:
    with pytest.raises(LeaseConfigurationError, match=r"Rules\.on: to="):
        Rules().on(status=404, to=to)


@pytest.mark.parametrize("name", ["", " ", 5])
def test_a_name_must_be_a_name(name: Any) -> None:
    with pytest.raises(LeaseConfigurationError, match="name="):
        Rules().on(status=404, name=name, to=STOP)
    with pytest.raises(LeaseConfigurationError, match="name="):
        Rules().use(lambda *_: None, name=name)


def test_a_hook_must_be_callable() -> None:
    with pytest.raises(LeaseConfigurationError, match=r"Rules\.use: .* write a function"):
        Rules().use(permanent())  # type: ignore[arg-type]
