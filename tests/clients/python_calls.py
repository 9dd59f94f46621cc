"""What Python itself raises, and errors around other errors."""

import errno
import json
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.clients.expectations import (
    ERROR,
    INFRASTRUCTURE,
    LIMIT_HIT,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    UNREACHABLE,
    Places,
    cases,
    raising,
)
from tests.clients.http_calls import httpx_of
from tests.clients.model_calls import openai, openai_says
from tests.clients.servers import (
    answers,
    name_servers_away,
    name_unknown,
    never_answers,
    patience,
    refuses,
    resets,
)

# ruff: noqa: BLE001 - applications do catch everything, and that is what is tried here


class DocumentFailed(Exception):
    """What an application raises in the place of a library's error."""


def chained(url: str) -> None:
    """An application's error with its cause."""
    try:
        openai(url)
    except Exception as error:
        raise DocumentFailed("invoice 1842") from error


def chained_twice(url: str) -> None:
    """As above, once more."""
    try:
        chained(url)
    except DocumentFailed as error:
        raise RuntimeError("the whole month failed") from error


def dissembled(url: str) -> None:
    """An application's error that hides its cause on purpose."""
    try:
        openai(url)
    except Exception:
        raise DocumentFailed("invoice 1842") from None


def stumbled(url: str) -> None:
    """A mistake of the application's own while it handles what it had expected."""
    try:
        openai(url)
    except Exception:
        json.loads("{}")["fallback"]


def grouped(url: str) -> None:
    """One of several calls failed."""
    try:
        httpx_of("httpx")(url)
    except Exception as error:
        raise ExceptionGroup("1 of 3 pages", [error]) from None


def grouped_with_another(url: str) -> None:
    """Two of several calls failed, one by a mistake."""
    try:
        openai(url)
    except Exception as error:
        raise ExceptionGroup("2 of 3 pages", [KeyError("total"), error]) from None


def going_round(url: str) -> None:
    """Two errors that are each other's cause."""
    try:
        openai(url)
    except Exception as error:
        outer = DocumentFailed("invoice 1842")
        outer.__cause__ = error
        error.__cause__ = outer
        raise outer  # noqa: B904 - its cause is set


def published(url: str) -> None:
    """Publish a task while the broker is unreachable."""
    from celery import Celery

    with Celery("shop", set_as_current=False) as app:
        app.conf.task_publish_retry = False
        # Without these, connecting is retried for a long time before an error is raised.
        app.conf.broker_transport_options = {
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
        }
        # Given here, because a worker's environment names a broker that answers.
        with app.connection_for_write(url.replace("http:", "amqp:") + "//") as connection:
            app.send_task("shop.charge", connection=connection)


def tenacious(url: str) -> None:
    """A call that tenacity repeats until it gives up."""
    import tenacity

    tenacity.retry(stop=tenacity.stop_after_attempt(2))(httpx_of("httpx"))(url)


def plain_socket(url: str) -> None:
    """One question and its answer."""
    where = urlsplit(url)
    with socket.create_connection(
        (where.hostname or "", where.port or 80), patience()
    ) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        connection.recv(1)


def _os_error(number: int) -> Any:
    """What is hard to meet, and so it is made."""

    def fail(_: Places) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def out_of_memory(_: Places) -> Any:
    """More than any machine has."""
    return [None] * 2**60


def soft_time_limit(_: Places) -> None:
    """What the pool raises in the body."""
    from celery.exceptions import SoftTimeLimitExceeded

    raise SoftTimeLimitExceeded


def wrong_answer(_: Places) -> Any:
    """An answer that is not what was asked for."""
    from pydantic import BaseModel

    class Invoice(BaseModel):
        total: int

    return Invoice.model_validate_json('{"total": "about ten"}')


def wrong_arguments(_: Places) -> Any:
    """An argument that is not what the task takes."""
    from celery import Celery
    from pydantic import BaseModel

    class Order(BaseModel):
        amount: int

    with Celery("shop", set_as_current=False) as app:

        def charge(order: Order) -> None:
            """Never reached."""

        # Celery looks annotations up by name, and these are local.
        charge.__annotations__ = {"order": Order}
        return app.task(pydantic=True)(charge)({"amount": "much"})


_BUSY = answers(429, openai_says("rate_limit_exceeded"), retry_after="20")
_GONE = answers(404, openai_says("model_not_found"))

PYTHON = [
    *raising(
        "Python",
        {
            "ValueError": (lambda _: int("about ten"), ERROR.of("ValueError")),
            "TypeError": (lambda _: 1 + None, ERROR.of("TypeError")),  # type: ignore[operator]
            "KeyError": (lambda _: json.loads("{}")["total"], ERROR.of("KeyError")),
            "AttributeError": (lambda _: None.total, ERROR.of("AttributeError")),  # type: ignore[attr-defined]
            "ZeroDivisionError": (lambda _: 1 / 0, ERROR.of("ZeroDivisionError")),
            "JSONDecodeError": (lambda _: json.loads("{oops"), ERROR.of("JSONDecodeError")),
            "UnicodeDecodeError": (lambda _: b"\xff".decode(), ERROR.of("UnicodeDecodeError")),
            "StopIteration": (lambda _: next(iter(())), ERROR.of("StopIteration")),
            "IsADirectoryError": (lambda _: open("/").read(), ERROR.of("IsADirectoryError")),  # noqa: PTH123, SIM115
            "FileNotFoundError": (lambda _: open("/nowhere/at/all").read(), REFUSED),  # noqa: PTH123, SIM115
            "PermissionError": (_os_error(errno.EACCES), REFUSED),
            "no space": (_os_error(errno.ENOSPC), ERROR.of("OSError")),
            "no route": (_os_error(errno.EHOSTUNREACH), UNREACHABLE),
            "BrokenPipeError": (_os_error(errno.EPIPE), OUTCOME_UNKNOWN),
            "MemoryError": (out_of_memory, LIMIT_HIT),
            "SoftTimeLimitExceeded": (soft_time_limit, LIMIT_HIT),
            "pydantic ValidationError of an answer": (wrong_answer, ERROR.of("ValidationError")),
            "pydantic ValidationError of the arguments": (wrong_arguments, REFUSED),
        },
    ),
    *cases(
        "socket",
        plain_socket,
        {
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "resets": (resets, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "name servers away": (name_servers_away, UNREACHABLE),
            "name unknown": (name_unknown, UNREACHABLE),
        },
    ),
]

WRAPPED = [
    *cases(
        "celery, a task is published:",
        published,
        {"refuses the connection": (refuses, INFRASTRUCTURE)},
    ),
    *cases(
        "raise from", chained, {"429": (_BUSY, RATE_LIMITED.after(20)), "404": (_GONE, REFUSED)}
    ),
    *cases("raise from, twice:", chained_twice, {"429": (_BUSY, RATE_LIMITED.after(20))}),
    *cases("raise from None", dissembled, {"429": (_BUSY, ERROR.of("DocumentFailed"))}),
    *cases("a mistake while handling", stumbled, {"404": (_GONE, ERROR.of("KeyError"))}),
    *cases("ExceptionGroup", grouped, {"429": (_BUSY, RATE_LIMITED.after(20))}),
    *cases(
        "ExceptionGroup, and a mistake:",
        grouped_with_another,
        {"429": (_BUSY, RATE_LIMITED.after(20))},
    ),
    *cases("a ring of causes", going_round, {"429": (_BUSY, RATE_LIMITED.after(20))}),
    *cases("tenacity", tenacious, {"429": (_BUSY, RATE_LIMITED.after(20))}),
]
