"""``celery leases`` in this process: what its commands print, change, refuse and exit with."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from celery import Celery
from click.testing import CliRunner
from sqlalchemy import update

from celery_leases import Cooldown, LeaseClient, LeasedTask
from celery_leases.cli import leases, output
from celery_leases.cli import show as showing
from celery_leases.decide.copies import UNCOPIED, waiter_mark
from celery_leases.errors import StoreUnavailable
from celery_leases.events import CallDropped, Dropped, ResultReplayed
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.commands.records import pages
from celery_leases.ops.metrics import EventCounter
from celery_leases.ops.reports import Page
from celery_leases.record_filters import RecordFilter
from celery_leases.worker.stored_messages import stored_form


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """Its output, an object of JSON on each line."""
        return [json.loads(line) for line in self.out.splitlines()]


Types = Callable[..., Done]
NAME = "commands.work"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    """An app whose calls run in this process, on a SQLite file that commands see too."""
    app = Celery("commands", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/r.db",
        leases_eager_stores=True,
    )
    broken: set[int] = set()
    app.broken = broken

    @app.task(base=LeasedTask, name=NAME, lease_key="k:{number}", shared=False)
    def work(number: int) -> int:
        if number in broken:
            raise KeyError(f"no {number}")
        if number > 99:
            raise Cooldown("1h", reason="later")
        return number

    OperatorClient.from_app(app, eager=True).how_many()
    yield app
    LeaseClient.from_app(app)._records.database.close()


@pytest.fixture
def types(app: Celery) -> Types:
    """Runs ``celery leases`` with some words."""

    def run(*words: str, given: str | None = None) -> Done:
        found = CliRunner().invoke(leases, list(words), obj=SimpleNamespace(app=app), input=given)
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return Done(found.exit_code, found.stdout, found.stderr)

    return run


def call(app: Celery, *numbers: int) -> None:
    for number in numbers:
        app.tasks[NAME].apply((number,))


def store_message(app: Celery, number: int) -> None:
    """As a worker does of a task with ``lease_outbox="store"``."""
    client = LeaseClient.from_app(app)
    call_id = client.status(f"k:{number}", task=NAME).call_id
    table = client._records.tables.records
    keep = update(table).where(table.c.key == f"k:{number}")
    message = stored_form(app.tasks[NAME].signature((number,), task_id=call_id))
    with client._records.database.engine.connect() as connection:
        connection.execute(keep.values(message=message))


def states(types: Types) -> dict[str, str]:
    return {row["key"]: row["state"] for row in types("list", "--json").lines}


def test_the_list_has_age_runtime_next_try_and_reason(app: Celery, types: Types) -> None:
    app.broken.add(2)
    call(app, 1, 2, 100)
    head, *rows = types("list").out.splitlines()
    assert head.split()[:8] == ["STATE", "KEY", "TASK", "AGE", "RUNTIME", "NEXT", "TRY", "REASON"]
    assert [row.split()[:2] for row in rows] == [
        ["cooling", "k:100"],
        ["cooling", "k:2"],
        ["done", "k:1"],
    ]
    assert "when called, in 59m" in rows[0]
    assert " asked " in rows[0]
    assert re.search(r" \d+(\.\d)?s +\d+(\.\d)?s ", rows[2])  # its age and its run time


def test_pages_go_on_where_the_one_before_ended(app: Celery, types: Types) -> None:
    call(app, *range(5))
    first = types("list", "--limit", "3", "--json")
    assert [row["key"] for row in first.lines] == ["k:4", "k:3", "k:2"]
    where = first.err.split("--page ")[1].strip()
    rest = types("list", "--limit", "3", "--json", "--page", where)
    assert [row["key"] for row in rest.lines] == ["k:1", "k:0"]
    assert rest.err == ""
    assert types("list", "--page", "nonsense").code == 2


def test_show_prints_the_attempts_and_what_happens_next(app: Celery, types: Types) -> None:
    app.broken.add(2)
    call(app, 2)
    types("retry", "k:2")
    call(app, 2)
    shown = types("show", "k:2").out
    attempts = [
        line.split()
        for line in shown.splitlines()
        if " failed " in line and "anything-else: KeyError" in line
    ]
    assert len(attempts) == 2
    assert "in work" in shown
    assert "It does not run by itself: call the task again in" in shown
    (status,) = types("show", "k:2", "--json").lines
    assert [each["ended"] for each in status["attempts"]] == ["failed", "failed"]
    assert types("show", "nothing").code == 1


def test_statistics_are_counted(app: Celery, types: Types) -> None:
    app.broken.add(2)
    call(app, 0, 1, 2)
    counts = [line.split()[:3] for line in types("stats").out.splitlines()]
    assert counts[1:3] == [[NAME, "cooling", "1"], [NAME, "done", "2"]]
    (found,) = types("stats", "--json").lines
    assert [(each["state"], each["count"]) for each in found["states"]] == [
        ("cooling", 1),
        ("done", 2),
    ]
    assert found["rules"] == [{"rule": "anything-else", "reason": "error", "count": 1}]


def test_runs_saved_are_shown_by_task(
    app: Celery, types: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(app, 0, 0)
    without = "Saved runs are not counted: PROMETHEUS_MULTIPROC_DIR is not set."
    assert without in types("stats").out
    assert types("stats", "--json").lines[0]["saved_runs"] is None
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert "No run was saved so far." in types("stats").out
    counter = EventCounter()
    for task, replayed, dropped in ((NAME, 7, 1), ("other", 0, 4)):
        subject: Any = {"task": task, "key": "k", "call_id": "c"}
        for _ in range(replayed):
            counter.receive(ResultReplayed(**subject, first_call_id="f"))
        for _ in range(dropped):
            counter.receive(CallDropped(**subject, reason=Dropped.DONE_BY_OTHER, why=""))
    lines = types("stats").out.splitlines()
    at = next(place for place, line in enumerate(lines) if "RUNS SAVED" in line)
    assert [line.split() for line in lines[at + 1 :]] == [
        [NAME, "8", "7", "1"],
        ["other", "4", "0", "4"],
    ]
    assert types("stats", "--json").lines[0]["saved_runs"] == [
        {"task": NAME, "count": 8, "replayed": 7, "dropped": 1},
        {"task": "other", "count": 4, "replayed": 0, "dropped": 4},
    ]


def test_a_filter_is_tried_confirmed_and_carried_out(app: Celery, types: Types) -> None:
    app.broken |= {1, 2}
    call(app, 0, 1, 2, 100)
    store_message(app, 1)
    tried = types("retry", "--reason", "error", "--dry-run")
    assert (tried.code, "2 keys would be retried" in tried.err) == (0, True)
    assert [line.split()[1] for line in tried.out.splitlines()[1:]] == ["k:1", "k:2"]
    refused = types("retry", "--reason", "error", given="n\n")
    assert (refused.code, states(types)["k:1"]) == (1, "cooling")
    assert types("retry", "--reason", "error").code == 1, "no answer to the question"
    done = types("retry", "--reason", "error", "--yes")
    assert (done.code, done.err.splitlines()) == (
        0,
        [
            "1 key: its stored message was published: the call runs when a worker receives it",
            (
                "1 key: no message was published: call the task again with the arguments of the "
                f"key ({NAME}.delay(…))"
            ),
            "2 retried, 1 published, 0 unchanged",
        ],
    )
    assert states(types) == {"k:0": "done", "k:1": "pending", "k:2": "pending", "k:100": "cooling"}
    nothing = types("retry", "--reason", "error", "--state", "failed", "--yes")
    assert (nothing.code, "no key was found to retry" in nothing.err) == (0, True)


def test_several_keys_are_changed_and_unchanged_ones_are_listed(app: Celery, types: Types) -> None:
    app.broken.add(1)
    call(app, 0, 1)
    store_message(app, 1)
    done = types("retry", "k:0", "k:1", "k:9", "--json")
    assert done.code == 1
    assert [(row["key"], row["done"], row["published"]) for row in done.lines] == [
        ("k:0", False, None),
        ("k:1", True, True),
    ]
    assert "k:9: this key has neither a lease nor a record" in done.err
    assert "1 retried, 1 published, 2 unchanged" in done.err
    assert types("forget", "k:0", "k:1").code == 0
    assert states(types) == {}


def test_retry_publishes_the_stored_message_and_says_so(app: Celery, types: Types) -> None:
    app.broken.add(1)
    call(app, 1)
    store_message(app, 1)
    with app.connection_for_read() as connection:
        connection.SimpleQueue("celery").clear()  # of other tests in this process
    done = types("retry", "k:1")
    assert (done.code, "its stored message was published" in done.err) == (0, True)
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=30)
        assert json.loads(message.body)[0] == [1]
        message.ack()


def test_a_call_that_waits_for_a_closed_group_is_with_nobody_only_once_it_is_open(app, types):
    """Until then each rescue would publish one more copy, which waits too."""
    app.broken.add(1)
    call(app, 1)
    store_message(app, 1)
    client = OperatorClient.from_app(app)
    error = json.dumps(
        {
            "type": "x.Limited", "message": "", "rule": "rate-limited", "reason": "rate_limited",
            "group": "g",
        }
    )  # fmt: skip
    hour = 3_600_000_000
    table = client._records.tables.records
    old = {name: table.c[name] - 2 * hour for name in ("started_at", "finished_at", "retry_at")}
    with client._records.database.engine.connect() as connection:
        connection.execute(update(table).values(error=error, resumes=1, **old))
    client.close_group("g", "1h")
    assert types("rescue", "--dry-run").out == "0 would be published\n"
    client.open_group("g")
    assert types("rescue", "--dry-run").out.splitlines()[-1] == "1 would be published"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("forget",), "give keys"),
        (("retry", "k:1", "--state", "failed"), "not both"),
        (("list", "--since", "soon"), "is not a time"),
        (("list", "--since", "20260401"), "is not a time"),
        (("list", "--since", "0001-01-01T00:00+05:00"), "too far away"),
        (("list", "--since", "1h", "--until", "2h"), "nothing can match"),
        (("show", ""), "it is blank"),
        (("forget", "k:1", ""), "it is blank"),
        (("retry", "--state", "done"), "does nothing with keys that are done"),
        (("release", "--state", "cooling", "--state", "failed"), "cooling or failed"),
        (("group", "show", " "), "it is blank"),
        (("group", "close", " "), "it is blank"),
        (("list", "--limit", "0"), "--limit"),
        (("list", "--task", "nobody"), "its leased tasks are"),
        (("purge", "--state", "done"), "need --older"),
        (("purge", "--older", "soon"), "'soon' is not usable"),
        (("purge", "--older", "1d", "--state", "running"), "running"),
        (("forget", "k:1", "--retention", "soon"), "'soon' is not usable"),
        (("group", "close", "g", "--for", "soon"), "'soon' is not usable"),
        (("group", "open"), "GROUP"),
        (("group", "close", "provider", "4m"), "write --for 4m"),
        (("resolve", "k:1"), "--done"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_exits_with_2_and_a_word_of_help(types, words, answer) -> None:
    done = types(*words)
    assert (done.code, done.out) == (2, "")
    assert answer in done.err


def test_a_dry_run_lists_only_what_would_be_changed(app: Celery, types: Types) -> None:
    app.broken.add(1)
    call(app, 0, 1)
    tried = types("retry", "k:0", "k:1", "--dry-run")
    assert (tried.code, [line.split()[1] for line in tried.out.splitlines()[1:]]) == (1, ["k:1"])
    assert tried.err.splitlines() == [
        "k:0: it is done: there is nothing to retry",
        "1 key would be retried, 1 unchanged",
    ]
    tried = types("release", "k:0", "k:1", "--dry-run", "--json")
    assert (tried.code, tried.out) == (1, "")
    assert "0 keys would be released, 2 unchanged" in tried.err
    assert types("forget", "k:0", "k:1", "--dry-run").code == 0
    mixed = types("retry", "--state", "done", "--state", "cooling", "--dry-run")
    assert (mixed.code, "1 key would be retried, 1 unchanged" in mixed.err) == (1, True)


def test_release_of_what_nobody_holds_is_not_done_and_says_what_helps(app, types) -> None:
    app.broken.add(1)
    call(app, 0, 1)
    done = types("release", "k:0")
    assert (done.code, "nothing was released" in done.err) == (1, True)
    assert "`leases forget`" in done.err
    assert (types("release", "k:1").code, states(types)["k:1"]) == (1, "cooling")


def test_show_names_closed_groups_where_a_key_has_no_record(types: Types) -> None:
    assert "  groups  " not in types("show", "nothing").out
    types("group", "close", "openai:x")
    shown = types("show", "nothing")
    assert (shown.code, "calls of openai:x wait, and may have no record yet" in shown.out) == (
        1,
        True,
    )
    assert types("show", "nothing", "--json").lines[0]["state"] == "absent"


def test_show_names_the_calls_that_wait_and_a_missing_worker(app, types, monkeypatch) -> None:
    asked = "The next call of the task runs the body, unless its group is closed."
    assert asked in types("show", "k:7").out
    marks = LeaseClient.from_app(app, eager=False)._leases
    copy = str(UNCOPIED.after("a" * 32))
    for key in ("k:7", "k:8"):
        marks.swap_mark(f"t:{NAME}|{key}", waiter_mark("one", 0), None, copy, 60.0)
    waits = "1 call waits for it: until another call releases the key, or until its group"
    assert waits in types("show", "k:7").out
    assert types("show", "k:7", "--json").lines[0]["waiting"] == ["one"]
    call(app, 8)
    assert types("show", "k:8", "--json").lines[0]["waiting"] == ["one"]
    assert "worker" not in types("show", "k:7").out
    monkeypatch.setattr(showing, "worker_answers", lambda _: False)
    assert "no call runs until a worker is started" in types("show", "k:7").out
    assert "worker" not in types("show", "k:8").out, "it is done"


def test_show_has_the_times_of_this_machine(app, types, monkeypatch) -> None:
    call(app, 0)
    (status,) = types("show", "k:0", "--json").lines
    started = datetime.fromisoformat(status["started_at"])
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        here = started.astimezone(timezone(timedelta(hours=5, minutes=30)))
        shown = types("show", "k:0").out
        assert f"started at       {here.isoformat(' ', 'milliseconds')}\n" in shown
        assert f"\n  {here:%Y-%m-%d %H:%M:%S}  " in shown.replace("    ", "  ")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_purge_asks_and_deletes(app: Celery, types: Types) -> None:
    call(app, 0, 1, 100)
    assert types("purge").out == "0 records deleted\n"
    assert types("purge", "--older", "1ms", "--dry-run").out == "3 records would be deleted\n"
    assert types("purge", "--older", "1ms", given="n\n").code == 1
    assert types("purge", "--older", "1ms", "--state", "done", "--yes").out == "2 records deleted\n"
    assert states(types) == {"k:100": "cooling"}


def test_watch_looks_again_and_again(app: Celery, types: Types) -> None:
    call(app, 0)
    seen = types("watch", "--times", "2", "--every", "1ms").out
    assert seen.count("k:0") == 2
    assert seen.count("STATE") == 2


def test_watch_exits_with_1_where_the_last_look_found_no_database(app, types, monkeypatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("gone", False)

    monkeypatch.setattr(OperatorClient, "page", away)
    seen = types("watch", "--times", "2", "--every", "1ms")
    assert (seen.code, seen.err.count("gone")) == (1, 2)


def test_a_long_list_is_read_in_larger_and_larger_pages() -> None:
    asked: list[int] = []

    class Client:
        def page(self, *_: object, limit: int, **__: object) -> Page:
            asked.append(limit)
            return Page([None] * limit, "more")  # type: ignore[list-item]

    read = pages(Client(), RecordFilter(), "latest", 50_000)  # type: ignore[arg-type]
    assert sum(len(page.statuses) for page in read) == 50_000
    assert asked == [500, 2000, 8000, 10_000, 10_000, 10_000, 9_500]


def test_groups_are_closed_listed_and_opened(types: Types) -> None:
    assert types("group", "list").out == "all groups are open\n"
    closed = types("group", "close", "a", "b", "--for", "5m", "--why", "unpaid", "--json").lines
    assert [(row["group"], row["error"]) for row in closed] == [("a", "unpaid"), ("b", "unpaid")]
    assert types("group", "open", "a", "b").out == "all groups are open\n"
    assert (again := types("group", "open", "a")).code == 1
    assert "was already open" in again.err


def test_the_summaries_of_the_commands_are_whole_sentences(types: Types) -> None:
    shown = types("--help").out
    assert "..." not in shown.partition("Commands:")[2]
    assert all(command in shown for command in leases.list_commands(None))


@pytest.mark.parametrize("words", [("list",), ("show", "k:1"), ("doctor",)])
def test_without_an_app_nothing_is_shown_or_created(words, tmp_path, monkeypatch) -> None:
    """Celery would use an app of its own, whose stores are not those of any worker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("celery_leases.cli.root.leased_tasks", lambda _: {})  # shared ones of tests
    nobody = SimpleNamespace(app=Celery("default", set_as_current=False))
    done = CliRunner().invoke(leases, words, obj=nobody)
    assert (done.exit_code, done.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    assert f"write celery -A yourapp leases {words[0]}" in done.stderr


def test_a_group_shows_when_it_was_closed(types: Types) -> None:
    assert types("group", "show", "a").out.splitlines()[-1] == "not closed in the last 30 days"
    types("group", "close", "a", "--for", "5m")
    types("group", "open", "a")
    types("group", "close", "a", "--for", "1h")
    head, row, _, _, *closings = types("group", "show", "a").out.splitlines()
    assert (re.split(r"\s{2,}", head)[:3], row.split()[:3]) == (
        ["STATE", "GROUP", "IN A ROW"],
        ["closed", "a", "1"],
    )
    assert re.search(r" 2 in \d+(\.\d)?s ", row)
    second, first = (re.split(r"\s{2,}", line)[1:] for line in closings)
    assert second == ["60m", "1", "operator", "asked"]
    assert first[:-1] == ["5m", "1", "operator", "asked"]
    assert re.fullmatch(r"after \d+(\.\d)?s", first[-1])
    (status,) = types("group", "show", "a", "--json").lines
    assert [round(each["seconds"]) for each in status["closings"]] == [3600, 300]
    assert status["closings"][0]["opened_at"] is None
    types("group", "open", "a")
    assert types("group", "list").out == "all groups are open\n"
    assert types("group", "list", "--all").out.splitlines()[1].split()[:2] == ["open", "a"]


def on_a_terminal(code: str, columns: int) -> list[str]:
    """The lines that *code* prints on a terminal so wide."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env=os.environ | {"COLUMNS": str(columns)}
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how a terminal ends on Linux
        pass
    os.close(ours)
    assert process.wait(60) == 0
    return shown.decode().splitlines()


LISTING = """
from celery_leases.ops.commands.records import HEAD, OPTIONAL
from celery_leases.cli.output import echo_table
row = ("cooling", "invoice:1844:2026-04", "billing.send_invoice", "21s", "0.9s", "when called, in 2m")
echo_table([HEAD, (*row, "rate_limited", "1", "0", "0", "vm/10508")], optional=OPTIONAL)
"""


@pytest.mark.parametrize("columns", [12, 24, 40, 60, 80, 100, 120, 200])
def test_the_list_fits_on_any_terminal(columns: int) -> None:
    head, row = on_a_terminal(LISTING, columns)
    assert max(map(output._width, (head, row))) <= columns
    if columns >= 80:
        assert "invoice:184" in row
    assert ("HOLDER" in head) == (columns >= 120)


def test_an_output_that_takes_nothing_is_one_line() -> None:
    group = "import click\nfrom celery_leases.cli.root import _Group\nmain = _Group('main')\n"
    code = f"{group}@main.command()\ndef show():\n    exec({LISTING!r})\nmain()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "Error: [Errno 28] No space left on device\n")


PRINTING = """
from celery_leases.cli.output import echo_table
echo_table([("STATE", "KEY", "REASON"), *((f"s{n}", "k" * 300, "é界" * 40) for n in range(%d))])
"""


def test_a_table_is_cut_to_the_terminal() -> None:
    lines = on_a_terminal(PRINTING % 2, 60)
    assert len(lines) == 3
    assert max(map(output._width, lines)) <= 60
    assert lines[1].count("…") == 2
    piped = subprocess.run(
        [sys.executable, "-c", PRINTING % 1], capture_output=True, text=True, timeout=60, check=True
    )
    assert "k" * 300 in piped.stdout


def test_a_closed_pipe_is_no_error() -> None:
    code = f"import click\n@click.command()\ndef main():\n    exec({PRINTING % 100_000!r})\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) in (1, -signal.SIGPIPE)
