"""What is read from an error, whichever library raised it."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from celery_leases.failures.error_facts import facts_of
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import RpcError, answer, aws, fake_class, fake_error, http_error

# -- names and message -----------------------------------------------------------------------------


def test_names_are_dotted_most_specific_first_and_without_what_every_error_is() -> None:
    family = fake_class(
        "shop.errors.Declined", fake_class("shop.errors.ShopError", ConnectionError)
    )
    assert facts_of(family()).names == (
        "shop.errors.Declined", "shop.errors.ShopError", "ConnectionError", "OSError",
    )  # fmt: skip
    assert facts_of(Exception()).names == ()


def test_a_message_is_cut_and_without_secrets() -> None:
    facts = facts_of(ValueError("token=abc123 \x00\ud800" + "x" * 10_000))
    assert facts.message.startswith("token=[redacted] ?xxx")
    assert len(facts.message) == 500


def test_an_error_that_cannot_be_put_into_words_has_none() -> None:
    """A broken ``__str__`` hides nothing else."""

    class Mute(Exception):
        status_code = 404

        def __str__(self) -> str:
            raise RuntimeError

    facts = facts_of(Mute())
    assert (facts.message, facts.status) == ("", 404)


# -- status ----------------------------------------------------------------------------------------

STATUSES: list[tuple[str, Any]] = [
    ("openai, httpx's SDKs", fake_error("openai.RateLimitError", status_code=429)),
    (
        "aiohttp, kubernetes",
        fake_error("aiohttp.client_exceptions.ClientResponseError", status=429),
    ),
    ("stripe", fake_error("stripe._error.RateLimitError", http_status=429)),
    ("google-api-core, urllib", fake_error("google.api_core.exceptions.TooManyRequests", code=429)),
    (
        "google-genai",
        fake_error("google.genai.errors.ClientError", code=429, status="RESOURCE_EXHAUSTED"),
    ),
    ("requests, httpx", fake_error("requests.exceptions.HTTPError", response=answer(429))),
    ("aiohttp's response", fake_error("shop.Error", response=SimpleNamespace(status=429))),
    (
        "googleapiclient",
        fake_error("googleapiclient.errors.HttpError", resp=SimpleNamespace(status=429)),
    ),
    ("botocore", aws("Throttling", 429)),
    ("as text", fake_error("shop.Error", status_code="429")),
]


@pytest.mark.parametrize(
    "error", [error for _, error in STATUSES], ids=[library for library, _ in STATUSES]
)
def test_the_status_is_found_wherever_a_library_keeps_it(error: BaseException) -> None:
    facts = facts_of(error)
    assert facts.status == 429
    assert type(facts.status) is int


@pytest.mark.parametrize(
    "value", [0, 99, 600, True, 429.0, "42", "4290", "a lot", None, Mock(), [429], (429,)]
)
def test_what_is_no_status_is_not_taken_for_one(value: Any) -> None:
    assert facts_of(fake_error("shop.Error", status_code=value, code=value)).status is None


def test_a_response_that_is_false_is_a_response() -> None:
    class Response(SimpleNamespace):
        def __bool__(self) -> bool:
            return False

    assert (
        facts_of(
            fake_error("requests.HTTPError", response=Response(status_code=404, headers={}))
        ).status
        == 404
    )


def test_no_attribute_that_warns_is_asked_for() -> None:
    class ClientResponseError(Exception):
        status = 0

        @property
        def code(self) -> int:
            warnings.warn("code property is deprecated", DeprecationWarning, stacklevel=2)
            return 500

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert facts_of(ClientResponseError()).status is None
    assert caught == []


# -- codes -----------------------------------------------------------------------------------------


def test_codes_come_from_attributes_and_nested_bodies_as_written() -> None:
    body = {
        "type": "error",
        "error": {"type": "rate_limit_error", "details": {"error_code": "enforced_limit"}},
    }
    facts = facts_of(fake_error("anthropic.RateLimitError", code="Own-Code", body=body))
    assert facts.codes == ("Own-Code", "rate_limit_error", "enforced_limit")
    assert facts.code == "Own-Code"
    assert facts_of(ValueError()).code is None


PARSED = {"error": {"code": "card_declined", "type": "card_error"}}
BODY = json.dumps(PARSED)
BODIES: list[tuple[str, Any]] = [
    ("a dict", fake_error("shop.Error", body=PARSED)),
    ("a list", fake_error("shop.Error", body=[PARSED])),
    ("JSON text", fake_error("shop.Error", body=BODY)),
    ("JSON bytes", fake_error("shop.Error", body=BODY.encode())),
    ("stripe", fake_error("stripe._error.CardError", json_body=PARSED)),
    (
        "a body that requests or httpx has read",
        fake_error("shop.Error", response=answer(402, _content=BODY.encode())),
    ),
    (
        "slack",
        fake_error(
            "shop.Error",
            response=answer(200, data={"error": "card_declined", "type": "card_error"}),
        ),
    ),
    ("googleapiclient", fake_error("googleapiclient.errors.HttpError", content=BODY.encode())),
]


@pytest.mark.parametrize("error", [error for _, error in BODIES], ids=[name for name, _ in BODIES])
def test_a_code_is_found_in_a_body_of_any_form(error: BaseException) -> None:
    assert set(facts_of(error).codes) == {"card_declined", "card_error"}


@pytest.mark.parametrize(
    "body",
    [
        "<html>", b"\xff\xfe", "{oops", "", "[1, 2", "[" * 15_000, 5, Mock(), {"code": ["a"]},
        {5: 6}, [[[[[PARSED]]]]],
    ],
    ids=stable_id,
)  # fmt: skip
def test_a_body_without_codes_has_none(body: Any) -> None:
    assert facts_of(fake_error("shop.Error", body=body)).codes == ()


def test_a_body_that_would_take_long_to_parse_is_left_alone() -> None:
    """Error bodies are short; a long text is something else."""
    assert facts_of(fake_error("shop.Error", body=BODY + " " * 30_000)).codes == ()


def test_a_body_that_was_not_read_is_not_read_now() -> None:
    read = []

    class Response:
        def __getattr__(self, name: str) -> Any:
            read.append(name)
            raise AttributeError(name)

        @property
        def content(self) -> bytes:
            read.append("content")
            return b"{}"

        status_code, headers = 500, ()
        json = text = data = body = read = _content = content

    assert facts_of(fake_error("shop.Error", response=Response())).status == 500
    assert read == []


def test_numbers_are_codes_unless_they_are_statuses() -> None:
    assert facts_of(fake_error("shop.Error", status=429, code=20429)).codes == ("20429",)
    assert facts_of(fake_error("shop.Error", status_code=429, code=429)).codes == ()


def test_a_sentence_is_no_code() -> None:
    assert facts_of(fake_error("urllib.error.HTTPError", reason="Not Found")).codes == ()


def test_the_documentation_link_of_sqlalchemy_is_no_code() -> None:
    assert facts_of(fake_error("sqlalchemy.exc.OperationalError", code="e3q8")).codes == ()


# -- headers ---------------------------------------------------------------------------------------

PAIRS = [("Retry-After", "3"), ("X-Secret", "s")]
HEADERS: list[tuple[str, Any]] = [
    ("a dict", dict(PAIRS)),
    ("pairs", PAIRS),
    ("pairs of bytes", [(b"Retry-After", b"3"), (b"X-Secret", b"s")]),
    ("an object with items", SimpleNamespace()),
    ("a number as the value", {"RETRY-AFTER": 3}),
    (
        "among nonsense",
        [None, (), ("a",), ("a", "b", "c"), (None, None), ("retry-after", None), *PAIRS],
    ),
]


class Items:
    """What multidicts and email messages have in common."""

    def items(self) -> Any:
        """Pairs, one by one."""
        return iter(PAIRS)


@pytest.mark.parametrize(
    "headers", [value for _, value in HEADERS], ids=[name for name, _ in HEADERS]
)
def test_headers_come_in_many_forms(headers: Any) -> None:
    headers = Items() if isinstance(headers, SimpleNamespace) else headers
    assert facts_of(fake_error("shop.Error", headers=headers)).headers == {"retry-after": "3"}
    assert facts_of(fake_error("shop.Error", response=answer(429, headers))).headers == {
        "retry-after": "3"
    }


@pytest.mark.parametrize(
    "headers", [None, 5, "Retry-After: 3", Mock(), MagicMock(), object(), [1, 2], {"a": object()}]
)
def test_other_values_are_not_taken_for_headers(headers: Any) -> None:
    assert facts_of(fake_error("shop.Error", headers=headers)).headers == {}


def test_headers_of_botocore_and_grpc_are_found_too() -> None:
    assert facts_of(aws("SlowDown", x_amz_retry_after="1500")).headers == {
        "x-amz-retry-after": "1500"
    }
    assert facts_of(RpcError("UNAVAILABLE", metadata=(("retry-after", "3"),))).headers == {
        "retry-after": "3"
    }


def test_values_are_cut_and_the_windows_of_anthropic_are_retained() -> None:
    error = http_error(
        429, retry_after="9" * 1000, anthropic_ratelimit_input_tokens_reset="later", cookie="secret"
    )
    assert facts_of(error).headers == {
        "retry-after": "9" * 200,
        "anthropic-ratelimit-input-tokens-reset": "later",
    }


def test_a_header_that_a_users_rule_reads_is_retained() -> None:
    assert facts_of(http_error(500, x_shop="closed"), {"x-shop"}).headers == {"x-shop": "closed"}
