"""What is read from errors of databases, gRPC and mail, and what errors say of themselves."""

from __future__ import annotations

import socket
import sqlite3
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.failures.error_facts import facts_of
from tests.unit.case_ids import stable_id
from tests.unit.fake_errors import RpcError, fake_class, fake_error

# -- databases, gRPC, mail -------------------------------------------------------------------------


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
