"""The errors behind an error."""

from __future__ import annotations

import pickle

import pytest

from celery_leases.failures.error_facts import ErrorFacts, facts_of
from celery_leases.failures.exception_chain import error_chain
from tests.unit.fake_errors import caused, fake_error, http_error


def names(error: BaseException) -> list[str]:
    """The classes of an error and of what it wraps."""
    return [type(one).__name__ for one in error_chain(error)]


def test_the_chain_goes_from_the_outermost_error_inwards() -> None:
    refused = ConnectionRefusedError(111, "refused")
    new = fake_error("urllib3.exceptions.NewConnectionError", said=("conn", "failed"))
    exceeded = fake_error("urllib3.exceptions.MaxRetryError", reason=new)
    assert names(caused(ValueError(), caused(KeyError(), OSError()))) == [
        "ValueError",
        "KeyError",
        "OSError",
    ]
    assert names(fake_error("requests.exceptions.ConnectionError", said=(exceeded,))) == [
        "ConnectionError", "MaxRetryError", "NewConnectionError",
    ]  # fmt: skip
    assert names(fake_error("urllib3.exceptions.ProtocolError", said=("aborted", refused))) == [
        "ProtocolError", "ConnectionRefusedError",
    ]  # fmt: skip
    for hidden in ("orig", "os_error", "original_error", "cause", "reason"):
        assert names(fake_error("shop.Error", **{hidden: refused})) == [
            "Error",
            "ConnectionRefusedError",
        ]
    assert names(fake_error("botocore.exceptions.EndpointConnectionError", kwargs={"error": refused})) == [
        "EndpointConnectionError", "ConnectionRefusedError",
    ]  # fmt: skip
    group = ExceptionGroup("two", [caused(KeyError(), OSError()), ValueError()])
    assert names(group) == ["ExceptionGroup", "KeyError", "OSError", "ValueError"]


def test_an_error_that_was_hidden_on_purpose_stays_hidden() -> None:
    def stumble() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904 - on purpose

    with pytest.raises(ValueError, match="second") as raised:
        stumble()
    assert names(raised.value) == ["ValueError"]


def test_a_chain_is_bounded() -> None:
    deep: BaseException = OSError()
    for _ in range(100):
        deep = caused(ValueError(), deep)
    assert len(error_chain(deep)) == 8
    assert len(error_chain(ExceptionGroup("many", [ValueError(n) for n in range(100)]))) == 16
    one, two = ValueError(), KeyError()
    caused(caused(one, two).__cause__ or one, one)
    assert names(one) == ["ValueError", "KeyError"]


def test_facts_are_merged_from_the_outermost_error_inwards() -> None:
    inner = http_error(429, {"code": "slow"}, "openai.RateLimitError", retry_after="3")
    outer = caused(fake_error("shop.errors.Failed", said="the month failed", code="own"), inner)
    facts = facts_of(outer)
    assert (facts.names[0], facts.status, facts.codes) == ("shop.errors.Failed", 429, ("own",))
    assert facts.headers == {"retry-after": "3"}
    assert facts.message == "the month failed"
    assert [(one.status, one.codes) for one in facts.chain] == [(None, ("own",)), (429, ("slow",))]
    assert all(one.chain == () for one in facts.chain)


def test_what_an_inner_error_says_of_itself_is_merged_too() -> None:
    assert (
        facts_of(caused(ValueError(), fake_error("shop.Error", retryable=False))).retryable is False
    )


def test_facts_are_plain_data() -> None:
    facts = facts_of(http_error(429, retry_after="3"))
    assert pickle.loads(pickle.dumps(facts)) == facts  # noqa: S301 - our own bytes
    assert ErrorFacts() == ErrorFacts()
