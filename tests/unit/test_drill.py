"""``celery leases drill`` without workers: the reasons for a miss, what it would do, what it
refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_leases import LeasedTask
from celery_leases.cli import leases
from celery_leases.ops.drill.report import Bounds, StepReport, Takeover
from celery_leases.ops.drill.worker import TASK, Notes
from celery_leases.ops.tuning import Delivery

Types = Callable[..., Result]
RABBIT = Delivery(0.0)
REDIS = Delivery(20.0, visibility_timeout=3600.0)
GOOD = Delivery(13.0, visibility_timeout=12.0)


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    """An app on Redis, whose tasks have two ttls; no server is asked."""
    app = Celery("drilled", broker="redis://localhost:1/0", set_as_current=False)
    app.conf.broker_transport_options = {
        "visibility_timeout": 90,
        "unacked_restore_interval": 5,
        "unacked_restore_throttle": 1,
    }
    app.conf.update(
        leases_url="redis://localhost:1/1", leases_database_url=f"sqlite:///{tmp_path}/r.db"
    )

    def work() -> None:
        pass

    for name, ttl in (("short", "12s"), ("long", "1m")):
        leased = app.task(
            base=LeasedTask, name=f"drilled.{name}", lease_key="k", lease_ttl=ttl, shared=False
        )
        leased(work)
    return app


@pytest.fixture
def types(app: Celery) -> Types:
    """Runs ``celery leases drill`` with some words."""

    def run(*words: str, said: str | None = None) -> Result:
        return CliRunner().invoke(
            leases, ["drill", *words], obj=SimpleNamespace(app=app), input=said
        )

    return run


@pytest.mark.parametrize(
    ("ttl", "delivery", "who", "begin"),
    [
        (60.0, RABBIT, "another call", "the ttl: "),
        (60.0, RABBIT, "its own call", "the ttl: "),
        (15.0, REDIS, "its own call", "the ttl: "),
        (60.0, GOOD, "its own call", "the ttl: "),
        (10.0, GOOD, "its own call", "not the settings: "),
        (10.0, REDIS, "another call", "not the settings: "),
    ],
)
def test_a_miss_names_what_causes_it(ttl, delivery, who, begin) -> None:
    assert Bounds(ttl, 30.0, delivery).why_missed("worker", who).startswith(begin)


def test_a_ttl_is_advised_where_there_is_one() -> None:
    assert "write lease_ttl=14 or less" in Bounds(60.0, 30.0, RABBIT).why_missed(
        "pause", "another call"
    )
    assert "no lease_ttl" in Bounds(60.0, 15.0, RABBIT).why_missed("pause", "another call")


def test_a_step_is_met_when_its_takeovers_are_and_nothing_else_is_wrong() -> None:
    in_time = Takeover("another call", 7.5, 60.0, 16.0)
    late = Takeover("its own call", 31.0, 60.0, 16.0, "the ttl")
    assert StepReport("worker", 30.0, 10.0, [in_time]).met
    assert not StepReport("worker", 30.0, 10.0, [in_time, late]).met
    assert not StepReport("double", 30.0, 10.0, [], ["the body of one call ran 2 times"]).met


def test_notes_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    notes = Notes(path)
    assert notes.all() == []
    first = Notes(path, 1).write("began", "key", "call")
    with path.open("a") as file:
        file.write('{"what": "re')
    assert notes.all() == [first]
    with path.open("a") as file:
        file.write('turned", "at": 1.5, "worker": 2, "pid": 7}\n')
    assert [note.what for note in notes.all()] == ["began", "returned"]


def test_a_dry_run_shows_what_would_be_done(types: Types, app: Celery) -> None:
    lines = [json.loads(line) for line in types("--dry-run", "--json").stdout.splitlines()]
    assert [line["step"] for line in lines] == ["child", "double", "pause", "worker"]
    assert {line["ttl"] for line in lines} == {60.0}
    assert lines[-1]["bounds"] == {"another call": 105.0, "its own call": 105.0}
    assert lines[0]["bounds"] == {"its own call": None}
    (line,) = types(
        "--dry-run", "--json", "--step", "pause", "--task", "drilled.short"
    ).stdout.splitlines()
    assert json.loads(line)["ttl"] == 12.0
    assert "kill a whole worker" in types("--dry-run").stdout
    assert TASK not in app.tasks


@pytest.mark.parametrize(
    "words",
    [
        ("--task", "drilled.unknown"), ("--task", "drilled.short", "--ttl", "5s"),
        ("--ttl", "100ms"), ("--takeover-slo", "soon"), ("--step", "coffee"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_exits_with_2(types: Types, words: tuple[str, ...]) -> None:
    assert types(*words, "--yes").exit_code == 2


def test_an_app_without_a_name_cannot_be_drilled(types: Types) -> None:
    done = types("--yes")
    assert done.exit_code == 2
    assert "celery -A" in done.stderr
