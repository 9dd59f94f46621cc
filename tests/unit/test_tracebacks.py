"""Tracebacks as records keep them."""

from __future__ import annotations

import pytest

from celery_leases.worker.tracebacks import (
    FRAMES,
    TRACEBACK_MAX,
    _without_strings,
    traceback_of,
)


def raised(depth: int = 0, cause: BaseException | None = None) -> BaseException:
    """An exception with so many frames."""

    def sink(left: int) -> None:
        if left:
            sink(left - 1)
        raise ValueError("boom") from cause

    try:
        sink(depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_it_names_file_line_and_function_and_shows_the_line() -> None:
    text = traceback_of(raised())
    assert text is not None
    lines = text.splitlines()
    assert "test_tracebacks.py:" in lines[-2]
    assert lines[-2].endswith(" in sink")
    assert lines[-1] == '    raise ValueError("…") from cause'


def test_of_many_frames_the_first_and_the_last_ones_are_stored() -> None:
    text = traceback_of(raised(500))
    assert text is not None
    assert f"{502 - FRAMES} frames left out" in text or len(text) > TRACEBACK_MAX - 400
    assert text.endswith('raise ValueError("…") from cause')
    assert len(text) <= TRACEBACK_MAX


def test_it_has_the_cause_of_the_error_without_secrets() -> None:
    text = traceback_of(raised(cause=OSError("postgres://me:hunter2@db refused\nat once")))
    assert text is not None
    assert (
        text.splitlines()[-1] == "  raised from OSError: postgres://[redacted]@db refused at once"
    )


def test_causes_that_go_in_a_circle_end() -> None:
    error = raised()
    error.__context__, error.__suppress_context__ = error, False
    assert traceback_of(error) is not None


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('login("admin", "hunter2")', 'login("…", "…")'),
        ("login(b'hunter2', r'a\\'hunter2')", "login(b'…', r'…')"),
        ("login(f'{name} hunter2', 'hunter2", "login(f'…', '…"),
        ('login("""hunter2""", 3)  # hunter2', 'login("""…""", 3)'),
        ('hunter2""", name)', "…"),
        ("order[\"id\"], pairs[0]['name']", "order[\"id\"], pairs[0]['name']"),
        ('order["hunter 2"], ["hunter2"]', 'order["…"], ["…"]'),
        ("login(user, password)", "login(user, password)"),
    ],
)
def test_a_line_of_source_has_no_content_of_strings_and_no_comment(line: str, shown: str) -> None:
    assert _without_strings(line) == shown


def test_an_exception_that_was_never_raised_has_none() -> None:
    assert traceback_of(ValueError("boom")) is None


def test_a_source_that_is_gone_leaves_names_and_numbers() -> None:
    try:
        exec(compile("\n1 / 0", "gone.py", "exec"))  # noqa: S102
    except ZeroDivisionError as error:
        shown = traceback_of(error)
    assert shown is not None
    assert shown.endswith("gone.py:2 in <module>")
