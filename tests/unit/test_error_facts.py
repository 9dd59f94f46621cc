"""What is read from an error, whichever library raised it."""

from __future__ import annotations

import json
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

from celery_leases.failures.error_facts import facts_of
from tests.unit.fake_errors import RpcError, answer, aws, caused, fake_class, fake_error, http_error

PARSED = {"error": {"code": "card_declined", "type": "card_error"}}
BODY = json.dumps(PARSED)
PAIRS = [("Retry-After", "3"), ("X-Secret", "s")]
NOTHING: list[Any] = [None, (), ("a",), ("a", "b", "c"), (None, None), ("retry-after", None)]
RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "13.5s"}
OTHER_INFO = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "RATE_LIMIT_EXCEEDED"}
# A serialized google.rpc.Status: code 8, message "no", one detail: RetryInfo of 13 s and 500 ms.
STATUS_BYTES = bytes.fromhex(
    f"0808 12026e6f 1a36 0a28 {b'type.googleapis.com/google.rpc.RetryInfo'.hex()} 120a 0a08 080d 1080cab5ee01"
)
RETRY_DELAY = SimpleNamespace(retry_delay=SimpleNamespace(seconds=13, nanos=500_000_000))


class Mute(Exception):
    """A broken ``__str__`` hides nothing else."""

    status_code = 404

    def __str__(self) -> str:
        raise RuntimeError


class FalseResponse(SimpleNamespace):
    """As those of requests are, below 400 only."""

    def __bool__(self) -> bool:
        return False


class Items:
    """What multidicts and email messages have in common."""

    def items(self) -> Any:
        return iter(PAIRS)


def of(dotted: str, **attributes: Any) -> Any:
    """An error of such a class with these attributes."""
    return fake_error(dotted, **attributes)


def shop(**attributes: Any) -> Any:
    """An error of a library that nobody knows."""
    return fake_error("shop.Error", **attributes)


def read(name: str, error: BaseException, **facts: Any) -> Any:
    """What is read from an error."""
    return pytest.param(error, facts, id=name)


RETRYABLE: list[tuple[dict[str, Any], bool | None]] = [
    ({"non_retryable": True}, False), ({"non_retryable": False}, None), ({"retryable": False}, False),
    ({"retryable": True}, True), ({"should_retry": False}, False), ({"should_retry": True}, True),
    ({"retryable": 0}, None), ({"retryable": None}, None), ({"retryable": lambda: False}, None),
    ({"retryable": Mock()}, None),
]  # fmt: skip
CASES = [
    read("names are dotted, most specific first",
         fake_class("shop.errors.Declined", fake_class("shop.errors.ShopError", ConnectionError))(),
         names=("shop.errors.Declined", "shop.errors.ShopError", "ConnectionError", "OSError")),
    read("without what every error is", Exception(), names=(), code=None),
    read("a message is cut and without secrets", ValueError("token=abc123 \x00\ud800" + "x" * 10_000),
         message="token=[redacted] ?" + "x" * 481 + "…"),
    read("an error that cannot be put into words has none", Mute(), message="", status=404),
    # The status is found wherever a library keeps it.
    read("status: openai, httpx's SDKs", of("openai.RateLimitError", status_code=429), status=429),
    read("status: aiohttp, kubernetes", of("aiohttp.client_exceptions.ClientResponseError", status=429), status=429),
    read("status: stripe", of("stripe._error.RateLimitError", http_status=429), status=429),
    read("status: google-api-core, urllib", of("google.api_core.exceptions.TooManyRequests", code=429), status=429),
    read("status: google-genai",
         of("google.genai.errors.ClientError", code=429, status="RESOURCE_EXHAUSTED"), status=429),
    read("status: requests, httpx", of("requests.exceptions.HTTPError", response=answer(429)), status=429),
    read("status: aiohttp's response", shop(response=SimpleNamespace(status=429)), status=429),
    read("status: googleapiclient",
         of("googleapiclient.errors.HttpError", resp=SimpleNamespace(status=429)), status=429),
    read("status: botocore", aws("Throttling", 429), status=429),
    read("status: as text", shop(status_code="429"), status=429),
    read("a response that is false is a response",
         of("requests.HTTPError", response=FalseResponse(status_code=404, headers={})), status=404),
    *(read(f"no status: {value!r:.9}", shop(status_code=value, code=value), status=None)
      for value in (0, 99, 600, True, 429.0, "42", "4290", "a lot", None, Mock(), [429], (429,))),
    # Codes come from attributes and nested bodies, as written.
    read("codes of an attribute and a nested body",
         of("anthropic.RateLimitError", code="Own-Code",
            body={"type": "error", "error": {"type": "rate_limit_error",
            "details": {"error_code": "enforced_limit"}}}),
         codes=("Own-Code", "rate_limit_error", "enforced_limit"), code="Own-Code"),
    read("body: a dict", shop(body=PARSED), codes=("card_declined", "card_error")),
    read("body: a list", shop(body=[PARSED]), codes=("card_declined", "card_error")),
    read("body: JSON text", shop(body=BODY), codes=("card_declined", "card_error")),
    read("body: JSON bytes", shop(body=BODY.encode()), codes=("card_declined", "card_error")),
    read("body: stripe", of("stripe._error.CardError", json_body=PARSED), codes=("card_declined", "card_error")),
    read("body: one that requests or httpx has read", shop(response=answer(402, _content=BODY.encode())),
         codes=("card_declined", "card_error")),
    read("body: slack", shop(response=answer(200, data={"error": "card_declined", "type": "card_error"})),
         codes=("card_error", "card_declined")),
    read("body: googleapiclient", of("googleapiclient.errors.HttpError", content=BODY.encode()),
         codes=("card_declined", "card_error")),
    *(read(f"a body without codes {number}", shop(body=body), codes=())
      for number, body in enumerate(("<html>", b"\xff\xfe", "{oops", "", "[1, 2", "[" * 15_000, 5, Mock(),
      {"code": ["a"]},
                                     {5: 6}, [[[[[PARSED]]]]], BODY + " " * 30_000))),
    read("a number is a code unless it is a status", shop(status=429, code=20429), codes=("20429",)),
    read("and not if it is one", shop(status_code=429, code=429), codes=()),
    read("a sentence is no code", of("urllib.error.HTTPError", reason="Not Found"), codes=()),
    read("the documentation link of sqlalchemy is no code",
         of("sqlalchemy.exc.OperationalError", code="e3q8"), codes=()),
    # Headers come in many forms.
    *(read(f"headers: {form}{where}", error, headers={"retry-after": "3"})
      for form, headers in (("a dict", dict(PAIRS)), ("pairs", PAIRS), ("items", Items()), ("a number",
      {"RETRY-AFTER": 3}),
                            ("bytes", [(b"Retry-After", b"3"), (b"X-Secret", b"s")]), ("nonsense", [*NOTHING,
                            *PAIRS]))
      for where, error in (("", shop(headers=headers)), (" of the response", shop(response=answer(429, headers))))),
    *(read(f"no headers {number}", shop(headers=headers), headers={})
      for number, headers in enumerate((None, 5, "Retry-After: 3", Mock(), MagicMock(), object(), [1, 2],
      {"a": object()}))),
    read("headers: botocore", aws("SlowDown", x_amz_retry_after="1500"), headers={"x-amz-retry-after": "1500"}),
    read("headers: grpc", RpcError("UNAVAILABLE", metadata=(("retry-after", "3"),)), headers={"retry-after": "3"}),
    read("values are cut and the windows of anthropic are retained",
         http_error(429, retry_after="9" * 1000, anthropic_ratelimit_input_tokens_reset="later", cookie="secret"),
         headers={"retry-after": "9" * 200, "anthropic-ratelimit-input-tokens-reset": "later"}),
    # Databases, gRPC, mail.
    read("sqlstate: psycopg, asyncpg", of("psycopg.errors.SerializationFailure", sqlstate="40001"), sqlstate="40001"),
    read("sqlstate: psycopg2", of("psycopg2.errors.SerializationFailure", pgcode="40001"), sqlstate="40001"),
    read("sqlstate: pyodbc", fake_error("pyodbc.OperationalError", said=("40001", "deadlock")), sqlstate="40001"),
    read("sqlstate: SQLAlchemy", of("sqlalchemy.exc.OperationalError", orig=of("psycopg.Error", sqlstate="40001")),
         sqlstate="40001"),
    *(read(f"no sqlstate: {value!r:.9}", of("psycopg.Error", sqlstate=value), sqlstate=None)
      for value in ("4000", "400011", "4000a", "", None, 40001, Mock())),
    read("errno: of the system", ConnectionRefusedError(111, "refused"), errno=111),
    read("errno: of a name", socket.gaierror(-3, "try again"), errno=-3),
    read("errno: of MySQL", fake_error("pymysql.err.OperationalError", said=(1213, "deadlock")), errno=1213),
    read("no errno of others", fake_error("shop.Error", said=(1213, "deadlock")), errno=None),
    read("a broken connection that SQLAlchemy has noticed",
         of("sqlalchemy.exc.DBAPIError", connection_invalidated=True), invalidated=True),
    read("only a plain True counts",
         of("sqlalchemy.exc.DBAPIError", connection_invalidated=Mock()), invalidated=False),
    read("grpc of google's other clients, an enum",
         of("google.api_core.exceptions.Aborted", grpc_status_code=SimpleNamespace(name="ABORTED"), code=409),
         grpc="ABORTED", status=409),
    read("grpc as text", of("google.genai.errors.ServerError", status="UNAVAILABLE"), grpc="UNAVAILABLE"),
    read("a mail server's reply is no HTTP status",
         of("smtplib.SMTPDataError", smtp_code=450), smtp=450, status=None),
    read("nor that of aiosmtplib", of("aiosmtplib.errors.SMTPResponseException", code=535), smtp=535, status=None),
    read("the mildest reply about several recipients counts",
         of("smtplib.SMTPRecipientsRefused", recipients={"a@x": (550, b"no such user"), "b@x": (450,
         b"come again")}), smtp=450),
    read("recipients without a reply", of("smtplib.SMTPRecipientsRefused", recipients={"a@x": None}), smtp=None),
    # What errors say of themselves.
    *(read(f"retryable {number}", shop(**attributes), retryable=said)
      for number, (attributes, said) in enumerate(RETRYABLE)),
    *(read(f"the default False of {name} is ignored", of(name, should_retry=False, retryable=False), retryable=None)
      for name in ("stripe._error.APIConnectionError", "google.auth.exceptions.TransportError")),
    *(read(f"a delay {number}", shop(retry_after=value), retry_after=seconds)
      for number, (value, seconds) in enumerate((
          (3, 3.0), (2.5, 2.5), (timedelta(seconds=4), 4.0), ("5", 5.0), ("1m30s", 90.0),
          *((none, None) for none in (0, -1, True, "soon", None, float("nan"), float("inf"), 10**400, Mock(),
          lambda: 3))))),
    read("retry info: JSON in the body",
         of("google.genai.errors.ClientError", details={"error": {"details": [OTHER_INFO, RETRY_INFO]}}),
         retry_info=13.5),
    read("retry info: JSON in the details",
         of("google.api_core.exceptions.TooManyRequests", details=[OTHER_INFO, RETRY_INFO]), retry_info=13.5),
    read("retry info: messages",
         of("google.api_core.exceptions.ResourceExhausted", details=[SimpleNamespace(reason="x"), RETRY_DELAY]),
         retry_info=13.5),
    read("retry info: bytes",
         RpcError("RESOURCE_EXHAUSTED", metadata=(("a", "b"), ("grpc-status-details-bin", STATUS_BYTES))),
         retry_info=13.5),
    read("what an inner error says of itself is merged",
         caused(ValueError(), shop(retryable=False)), retryable=False),
]  # fmt: skip


@pytest.mark.parametrize(("error", "expected"), CASES)
def test_a_fact_is_read_wherever_a_library_keeps_it(error, expected) -> None:
    facts = facts_of(error)
    found = {name: getattr(facts, name) for name in expected}
    assert found == expected
    assert [*map(type, found.values())] == [*map(type, expected.values())]


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


def test_a_header_that_a_users_rule_reads_is_retained() -> None:
    assert facts_of(http_error(500, x_shop="closed"), {"x-shop"}).headers == {"x-shop": "closed"}


def test_sqlite_names_its_error() -> None:
    with (
        sqlite3.connect(":memory:") as connection,
        pytest.raises(sqlite3.OperationalError) as raised,
    ):
        connection.execute("SELECT * FROM nowhere")
    connection.close()
    assert facts_of(raised.value).codes == ("SQLITE_ERROR",)


def test_the_grpc_code_is_asked_of_grpcs_own_errors_only() -> None:
    def code() -> Any:
        raise AssertionError("called")

    assert facts_of(RpcError("UNAVAILABLE")).grpc == "UNAVAILABLE"
    assert facts_of(RpcError("NONSENSE")).grpc is None
    assert facts_of(fake_error("shop.Error", code=code, trailing_metadata=code)).grpc is None


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
