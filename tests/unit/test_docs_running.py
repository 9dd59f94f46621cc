"""The pages about Sentry, OpenTelemetry and changes of a running system: their examples run,
eagerly.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_leases import signals
from celery_leases.events import AttemptSettled, CrashSeen
from celery_leases.options import OPTION_NAMES
from celery_leases.record import Failure
from celery_leases.settings import _SETTINGS
from tests.unit.doc_pages import blocks, eagerly, executed, markdown_rows, page, section

DATABASE = "postgresql+psycopg://localhost/billing"


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """What Sentry would be sent; its client of before is back afterwards."""
    sentry_sdk = pytest.importorskip(
        "sentry_sdk", reason="Sentry's SDK is not installed: it is in the group test"
    )
    before, sent = sentry_sdk.get_global_scope().client, []

    def keep(event: dict[str, Any], _: Any) -> None:
        sent.append(event)

    real = sentry_sdk.init

    def init(dsn: None, integrations: Any) -> None:
        assert dsn is None
        assert [one.identifier for one in integrations] == ["celery"]
        # Without its integrations, which would change Celery for the tests after this one.
        real(dsn="http://key@127.0.0.1:9/1", before_send=keep, default_integrations=False)

    sentry_sdk.init = init
    yield sent
    sentry_sdk.init = real
    sentry_sdk.get_global_scope().set_client(before)


def test_the_sentry_page_reports_what_only_a_person_can_mend(reports, tmp_path) -> None:
    (source,) = blocks(page("sentry"), "python")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        try:
            assert names["send_invoice"].delay(7).get() == {"customer": 7}
            told: Any = {"task": "billing.send_invoice", "key": "invoice:7", "call_id": "c"}
            for state, operator in (
                ("cooling", False),
                ("cooling", True),
                ("failed", False),
                ("uncertain", False),
            ):
                failure = Failure("E", "secret", "a-rule", "out_of_quota", operator=operator)
                ended: Any = {"ended": "failed", "attempt": 1, "runtime": 0.1, "failure": failure}
                signals.Announcer().observe(AttemptSettled(**told, state=state, **ended))
            signals.Announcer().observe(CrashSeen(**told, crashes=2, host="h"))
        finally:
            signals.attempt_settled.disconnect(names["report_what_only_a_person_can_mend"])
            signals.crash_seen.disconnect(names["report_a_crash"])
    assert [event["message"] for event in reports] == [
        "billing.send_invoice is cooling: out_of_quota",
        "billing.send_invoice is failed: out_of_quota",
        "billing.send_invoice is uncertain: out_of_quota",
        "billing.send_invoice: 2 crashes in a row",
    ]
    assert {event["tags"]["lease_key"] for event in reports} == {"invoice:7"}
    assert "secret" not in str(reports)


def test_the_errors_that_sentry_does_not_see_are_those_that_a_task_throws(tmp_path: Path) -> None:
    (row,) = (row for row in markdown_rows(page("sentry")) if "throws" in row[1])
    (source,) = blocks(page("opentelemetry"), "python")
    pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        thrown = {kind.__name__ for kind in names["send_invoice"].throws}
    assert set(re.findall(r"`(\w+)`", row[0])) == thrown


def test_the_opentelemetry_page_makes_spans_of_its_own_in_the_body(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
    (source,) = blocks(page("opentelemetry"), "python")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        assert names["send_invoice"].delay(7).get() == {"customer": 7}


def test_what_was_done_under_an_old_template_is_not_done_again(tmp_path: Path) -> None:
    _, source = blocks(page("changing-settings"), "python")
    template = '"invoice:{tenant}:{customer}:{month}"'
    assert template in source
    old = source.replace(template, '"invoice:{customer}:{month}"')
    old = old.replace("before = LeaseClient", "return _old()\n    before = LeaseClient")
    old += "\n_old = lambda: {'made': 'before'}\n"
    with executed(eagerly(old, tmp_path, DATABASE), "billing") as names:
        assert names["send_invoice"].delay("t", 1, "04").get() == {"made": "before"}
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        send = names["send_invoice"]
        assert send.lease_status("t", 1, "04").state == "absent"
        assert send.delay("t", 1, "04").get() == {"made": "before"}
        assert send.delay("t", 2, "04").get() == {"customer": 2, "mailed": "04"}


def test_a_record_is_kept_for_longer_on_request(tmp_path: Path) -> None:
    from celery_leases import LeaseClient, errors

    first, _ = blocks(page("changing-settings"), "python")
    for theirs, ours in (
        (DATABASE, f"sqlite:///{tmp_path / 'records.db'}"),
        ("redis://localhost/2", "database"),
    ):
        assert theirs in first
        first = first.replace(theirs, ours)
    with pytest.raises(errors.UnknownKey):
        exec(first, {})  # noqa: S102 - our own page
    assert callable(LeaseClient.resolve)


def test_the_tables_of_changes_name_what_there_is() -> None:
    known = {f"lease_{name}" for name in OPTION_NAMES} | {
        f"leases_{name}" for name in (*_SETTINGS, *OPTION_NAMES)
    }
    for title in ("What is safe in any order", "What needs all workers stopped"):
        rows = markdown_rows(section(page("changing-settings"), title).split("\n### ")[0])[1:]
        assert rows
        for row in rows:
            assert set(re.findall(r"`(\w+)`", row[0])) <= known, row
