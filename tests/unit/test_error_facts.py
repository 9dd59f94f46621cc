"""What is read from an error, whichever library raised it."""

from __future__ import annotations

import json
import pickle
import socket
import sqlite3
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.failures.error_facts import ErrorFacts, facts_of
from celery_leases.failures.exception_chain import error_chain
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import RpcError, answer, aws, caused, fake_class, fake_error, http_error

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


@pytest.mark.parametrize(
    "error",
    [
        fake_error("psycopg.errors.SerializationFailure", sqlstate="40001"),
        fake_error("psycopg2.errors.SerializationFailure", pgcode="40001"),
        fake_error("pyodbc.OperationalError", said=("40001", "deadlock")),
        fake_error(
            "sqlalchemy.exc.OperationalError", orig=fake_error("psycopg.Error", sqlstate="40001")
        ),
    ],
    ids=["psycopg, asyncpg, mysql-connector", "psycopg2", "pyodbc", "SQLAlchemy"],
)
def test_the_sqlstate_is_found_wherever_a_driver_keeps_it(error: BaseException) -> None:
    assert facts_of(error).sqlstate == "40001"


@pytest.mark.parametrize("value", ["4000", "400011", "4000a", "", None, 40001, Mock()])
def test_other_values_are_not_taken_for_a_sqlstate(value: Any) -> None:
    assert facts_of(fake_error("psycopg.Error", sqlstate=value)).sqlstate is None


def test_numbers_of_the_system_and_of_mysql() -> None:
    assert facts_of(ConnectionRefusedError(111, "refused")).errno == 111
    assert facts_of(socket.gaierror(-3, "try again")).errno == -3
    assert (
        facts_of(fake_error("pymysql.err.OperationalError", said=(1213, "deadlock"))).errno == 1213
    )
    assert facts_of(fake_error("shop.Error", said=(1213, "deadlock"))).errno is None


def test_sqlite_names_its_error() -> None:
    with (
        sqlite3.connect(":memory:") as connection,
        pytest.raises(sqlite3.OperationalError) as raised,
    ):
        connection.execute("SELECT * FROM nowhere")
    connection.close()
    assert facts_of(raised.value).codes == ("SQLITE_ERROR",)


def test_a_broken_connection_that_sqlalchemy_has_noticed() -> None:
    assert (
        facts_of(fake_error("sqlalchemy.exc.DBAPIError", connection_invalidated=True)).invalidated
        is True
    )
    assert (
        facts_of(fake_error("sqlalchemy.exc.DBAPIError", connection_invalidated=Mock())).invalidated
        is False
    )


def test_the_grpc_code_is_asked_of_grpcs_own_errors_only() -> None:
    def code() -> Any:
        raise AssertionError("called")

    assert facts_of(RpcError("UNAVAILABLE")).grpc == "UNAVAILABLE"
    assert facts_of(RpcError("NONSENSE")).grpc is None
    assert facts_of(fake_error("shop.Error", code=code, trailing_metadata=code)).grpc is None


def test_googles_other_clients_name_the_grpc_code_too() -> None:
    wrapped = fake_error(
        "google.api_core.exceptions.Aborted",
        grpc_status_code=SimpleNamespace(name="ABORTED"),
        code=409,
    )
    assert (facts_of(wrapped).grpc, facts_of(wrapped).status) == ("ABORTED", 409)
    assert (
        facts_of(fake_error("google.genai.errors.ServerError", status="UNAVAILABLE")).grpc
        == "UNAVAILABLE"
    )


def test_a_mail_servers_reply_is_no_http_status() -> None:
    facts = facts_of(fake_error("smtplib.SMTPDataError", smtp_code=450))
    assert (facts.smtp, facts.status) == (450, None)
    facts = facts_of(fake_error("aiosmtplib.errors.SMTPResponseException", code=535))
    assert (facts.smtp, facts.status) == (535, None)


def test_the_mildest_reply_about_several_recipients_counts() -> None:
    refused = {"a@x": (550, b"no such user"), "b@x": (450, b"come again")}
    assert facts_of(fake_error("smtplib.SMTPRecipientsRefused", recipients=refused)).smtp == 450
    assert (
        facts_of(fake_error("smtplib.SMTPRecipientsRefused", recipients={"a@x": None})).smtp is None
    )


# -- attributes with which errors describe themselves ----------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"non_retryable": True}, False),
        ({"non_retryable": False}, None),
        ({"retryable": False}, False),
        ({"retryable": True}, True),
        ({"should_retry": False}, False),
        ({"should_retry": True}, True),
        ({"retryable": 0}, None),
        ({"retryable": None}, None),
        ({"retryable": lambda: False}, None),
        ({"retryable": Mock()}, None),
    ],
    ids=stable_id,
)
def test_an_error_may_have_an_attribute_that_allows_or_forbids_a_retry(attributes, said) -> None:
    assert facts_of(fake_error("shop.Error", **attributes)).retryable is said


@pytest.mark.parametrize(
    "name", ["stripe._error.APIConnectionError", "google.auth.exceptions.TransportError"]
)  # fmt: skip
def test_a_default_false_is_ignored(name: str) -> None:
    assert facts_of(fake_error(name, should_retry=False, retryable=False)).retryable is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (3, 3.0),
        (2.5, 2.5),
        (timedelta(seconds=4), 4.0),
        ("5", 5.0),
        ("1m30s", 90.0),
        *(
            (none, None)
            for none in (
                0, -1, True, "soon", None, float("nan"), float("inf"), 10**400, Mock(), lambda: 3,
            )
        ),
    ],
    ids=stable_id,
)  # fmt: skip
def test_an_error_may_have_a_delay(value: Any, seconds: float | None) -> None:
    assert facts_of(fake_error("shop.Error", retry_after=value)).retry_after == seconds


# -- google.rpc.RetryInfo --------------------------------------------------------------------------

RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "13.5s"}
OTHER_INFO = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RATE_LIMIT_EXCEEDED"}
# A serialized google.rpc.Status: code 8, message "no", one detail: RetryInfo of 13 s and 500 ms.
STATUS_BYTES = bytes.fromhex(
    f"0808 12026e6f 1a36 0a28 {b'type.googleapis.com/google.rpc.RetryInfo'.hex()} 120a 0a08 080d 1080cab5ee01"
)
RETRY_DELAY = SimpleNamespace(retry_delay=SimpleNamespace(seconds=13, nanos=500_000_000))


@pytest.mark.parametrize(
    "error",
    [
        fake_error(
            "google.genai.errors.ClientError",
            details={"error": {"details": [OTHER_INFO, RETRY_INFO]}},
        ),
        fake_error("google.api_core.exceptions.TooManyRequests", details=[OTHER_INFO, RETRY_INFO]),
        fake_error(
            "google.api_core.exceptions.ResourceExhausted",
            details=[SimpleNamespace(reason="x"), RETRY_DELAY],
        ),
        RpcError(
            "RESOURCE_EXHAUSTED", metadata=(("a", "b"), ("grpc-status-details-bin", STATUS_BYTES))
        ),
    ],
    ids=["JSON in the body", "JSON in the details", "messages", "bytes"],
)
def test_retry_info_is_read_in_all_its_forms(error: BaseException) -> None:
    assert facts_of(error).retry_info == 13.5


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_status_are_ignored(data: bytes) -> None:
    told = facts_of(RpcError("INTERNAL", metadata=(("grpc-status-details-bin", data),))).retry_info
    assert told is None or told > 0


@given(st.integers(0, len(STATUS_BYTES)), st.integers(0, 255))
def test_a_damaged_status_is_ignored_except_for_its_delay(at: int, byte: int) -> None:
    damaged = STATUS_BYTES[:at] + bytes([byte]) + STATUS_BYTES[at + 1 :]
    told = facts_of(
        RpcError("INTERNAL", metadata=(("grpc-status-details-bin", damaged),))
    ).retry_info
    assert told is None or told > 0


# -- the task's own arguments ----------------------------------------------------------------------


def raised_through(*modules: str) -> BaseException:
    """A ValidationError of pydantic with frames of these modules, the outermost first."""
    error = fake_class("pydantic_core._pydantic_core.ValidationError", ValueError)("no")
    calls: Any = {"error": error}
    source = "def call():\n    raise error\n"
    for module in reversed(modules):
        frame = {**calls, "__name__": module}
        exec(source, frame)  # noqa: S102 - only the name of its module matters
        calls = {"inner": frame["call"]}
        source = "def call():\n    inner()\n"
    with pytest.raises(ValueError, match="no") as raised:
        frame["call"]()
    return raised.value


def test_pydantic_errors_of_the_tasks_own_arguments_are_distinguished_from_others() -> None:
    assert facts_of(raised_through("celery.app.base", "pydantic.main")).arguments is True
    assert (
        facts_of(raised_through("celery.app.base", "shop.tasks", "pydantic.main")).arguments
        is False
    )
    assert facts_of(fake_class("pydantic_core._pydantic_core.ValidationError")()).arguments is False
