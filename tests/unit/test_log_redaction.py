"""The log lines of celery_leases: printable, without secrets, and without effect on the task."""

import logging
from dataclasses import asdict, fields
from typing import Any

import pytest

from celery_leases import signals
from celery_leases.errors import KeyReused
from celery_leases.events import CallRefused, Event, LeaseHeldElsewhere
from celery_leases.record import Failure
from celery_leases.signals import LINE_MAX, Announcer, logger
from celery_leases.text.cleaning import printable


class RenewalResult(logging.Handler):
    """A handler that formats records and stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text and the record."""
        self.texts.append(self.format(record))
        self.records.append(record)


@pytest.fixture
def kept() -> Any:
    """A handler on the library's logger."""
    handler = RenewalResult()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def test_secrets_are_taken_out_of_tracebacks_and_the_exception_is_still_there(kept) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("denied for api_key=sk-abcdef0123456789")
    logger.warning("raised, and will run again", exc_info=raised.value)
    (record,), (text,) = kept.records, kept.texts
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value
    assert "sk-abcdef" not in text
    assert "RuntimeError: denied for api_key=[redacted]" in text
    assert "Traceback" in text


def test_an_error_that_cannot_be_printed_does_not_stop_the_line(kept: RenewalResult) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    logger.warning("raised, and will run again", exc_info=Unprintable())
    assert "raised, and will run again" in kept.texts[0]


def test_lines_without_an_exception_are_left_alone(kept: RenewalResult) -> None:
    logger.warning("a plain line")
    assert kept.records[0].exc_text is None


FORGED = "invoice:1\n[2026-11-22 06:00:00,000: WARNING/MainProcess] forged\x1b[2J\u202e"


def test_a_key_with_a_line_feed_forges_no_line(kept: RenewalResult) -> None:
    subject = {"task": f"shop.work{FORGED}", "key": FORGED, "call_id": FORGED}
    Announcer().observe(CallRefused(**subject, error=f"token=abc {FORGED}"))
    held = LeaseHeldElsewhere(
        **subject, holder=FORGED, holder_call_id=FORGED, remaining=1.0, same_call=False
    )
    Announcer().observe(held)
    logger.warning(
        "%s[%s] could not be rescheduled: %s", "shop.work", FORGED, OSError(f"no way {FORGED}")
    )
    assert len(kept.texts) == 3
    for text in kept.texts:
        assert text.isprintable()
        assert r"invoice:1\n[2026-11-22" in text
    assert "token=[redacted]" in kept.texts[0]
    assert kept.records[0].__dict__["data"]["key"] == FORGED


def an_event(kind: type[Event], text: str) -> Event:
    """One of that kind, *text* in each of its texts."""
    values = {
        "int": 3, "float": 1.25, "bool": True, "Failure": Failure("ValueError", text, "a-rule"),
    }  # fmt: skip
    given: dict[str, Any] = {
        each.name: values.get(str(each.type).partition(" ")[0], text) for each in fields(kind)
    }
    return kind(**given)


@pytest.mark.parametrize("kind", signals._SIGNALS)
@pytest.mark.parametrize("text", ["plain", FORGED, "k" * 1000])
def test_the_line_of_an_event_has_its_fields_and_its_record_all_of_them(kept, kind, text) -> None:
    event = an_event(kind, text)
    signals._log(event)
    (record,) = kept.records
    assert record.__dict__["data"] == asdict(event)
    assert record.__dict__["lease_event"] == signals._SIGNALS[kind][0].name
    shown = printable(text)
    assert kept.texts[0].startswith(f"{shown}[{shown}] key {shown}: ")
    assert kept.texts[0].isprintable()
    assert len(kept.texts[0]) <= LINE_MAX
    assert "{" not in kept.texts[0]


def test_a_long_key_is_cut_and_a_long_line_too(kept: RenewalResult) -> None:
    Announcer().observe(
        CallRefused(task="shop.work", key="k" * 100_000, call_id="call-1", error="no")
    )
    logger.warning("raised: %s", "x" * 100_000)
    assert kept.texts[0].endswith("…: refused: no")
    assert all(len(text) <= LINE_MAX for text in kept.texts)


def test_a_traceback_has_its_line_breaks_and_no_other_control_characters(kept) -> None:
    logger.warning("raised", exc_info=RuntimeError(f"\x1b[2J {'x' * 30_000_000}"))
    assert "\x1b" not in kept.texts[0]
    assert "RuntimeError: \\x1b[2J x" in kept.texts[0]
    assert len(kept.texts[0]) < 40_000


def test_the_message_of_an_error_shows_a_printable_key(kept: RenewalResult) -> None:
    error = KeyReused(f"{FORGED}: it stands for other arguments", FORGED, ["amount"])
    assert str(error).isprintable()
    assert error.key == FORGED
    assert str(type(error)(*error.args)) == str(error)
    assert len(str(KeyReused(f"{'k' * 9000}: other arguments", "k" * 9000))) < 400
