"""Tracebacks in the log lines of celery_leases: without secrets, and never in the way of what is being done."""

import logging
from typing import Any

import pytest

from celery_leases.signals import logger


class Kept(logging.Handler):
    """Formats as any handler would, and keeps the records."""

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
    handler = Kept()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_secrets_are_taken_out_of_tracebacks_and_the_exception_is_still_there(kept: Kept) -> None:
    """A handler that reports exceptions gets the object; whoever writes text gets no secret."""
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("denied for api_key=sk-abcdef0123456789")
    logger.warning("raised, and comes back", exc_info=raised.value)
    (record,), (text,) = kept.records, kept.texts
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value
    assert "sk-abcdef" not in text
    assert "RuntimeError: denied for api_key=[redacted]" in text
    assert "Traceback" in text


def test_an_error_that_cannot_be_printed_does_not_stop_the_line(kept: Kept) -> None:
    """Its own ``__str__`` raises."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    logger.warning("raised, and comes back", exc_info=Unprintable())
    assert "raised, and comes back" in kept.texts[0]


def test_lines_without_an_exception_are_left_alone(kept: Kept) -> None:
    """Nothing is formatted that is not there."""
    logger.warning("a plain line")
    assert kept.records[0].exc_text is None
