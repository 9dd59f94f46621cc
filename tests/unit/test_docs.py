"""The documentation says what the code does: its tables are compared, its examples run, its links
lead somewhere.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.events.state import Task as WatchedTask

import celery_leases
from celery_leases import LeaseClient, signals
from celery_leases.decide import before_run as decisions
from celery_leases.events import AttemptSettled, CrashSeen
from celery_leases.groups.group import ClosedGroup
from celery_leases.record import Failure, State
from celery_leases.status import status_of_group
from celery_leases.stores.sql.schema import Tables
from tests.unit.doc_pages import (
    PAGES,
    README,
    ROOT,
    blocks,
    eagerly,
    executed,
    markdown_rows,
    page,
    rest_rows,
    section,
    with_decisions,
)
from tests.unit.reference_pages import PAGES as REFERENCE_PAGES
from tests.unit.reference_pages import description, members

WORDS = 35_849
"""Words of docs that people have written, at most."""


# -- tables ----------------------------------------------------------------------------------------


def test_the_decision_tables_are_those_of_the_code() -> None:
    text = page("decisions")
    assert len(rest_rows(decisions.__doc__ or "")) > 15
    assert with_decisions(text) == text, "run python -m tests.unit.reference_pages"


@pytest.mark.parametrize("name", REFERENCE_PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    """The generator refuses a part of the code that has no description."""
    made = REFERENCE_PAGES[name]()
    assert page(name) == made, "run python -m tests.unit.reference_pages"
    assert len(made) > 1000


def test_the_generator_refuses_what_has_no_description() -> None:
    class Undescribed:
        #: It has one.
        first: int
        second: int

        def method(self) -> None: ...

    assert description(Undescribed, "first") == "It has one."
    with pytest.raises(AssertionError, match=r"Undescribed\.second"):
        description(Undescribed, "second")
    with pytest.raises(AssertionError, match=r"Undescribed\.method"):
        [*members(Undescribed)]


def written_by_hand(path: Path) -> str:
    """A page of docs without the tables that a program has written into it."""
    if path.stem in REFERENCE_PAGES and path.parent.name == "reference":
        return ""
    text = path.read_text()
    text = re.sub(r"<!-- .*?written by .*? -->.*?<!-- end of .*? -->", "", text, flags=re.DOTALL)
    if path.name == "decisions.md":
        text = re.sub(r"(?:^\|.*\n)+", "", text, count=3, flags=re.MULTILINE)
    return text


def test_pages_are_short_and_the_documentation_is_too() -> None:
    """Bounds that may only fall: a page that grows makes another one shorter."""
    pages = {path: written_by_hand(path) for path in (ROOT / "docs").rglob("*.md")}
    long = {
        path.name: len(text.splitlines()) for path, text in pages.items() if text.count("\n") > 250
    }
    assert long == {}
    assert sum(len(text.split()) for text in pages.values()) <= WORDS


def test_the_rights_are_those_of_every_table() -> None:
    """On each kind of server; nothing else is granted."""
    tables = {table.name for table in Tables().metadata.tables.values()}
    written = blocks(section(page("databases"), "Rights"), "sql")
    assert len(written) == 2
    for block in written:
        assert set(re.findall(r"celery_leases_\w+", block)) == tables


def drawn(diagram: str) -> set[str]:
    """The states of a Mermaid diagram, each of which can be entered and left."""
    arrows = re.findall(r"^ +(\S+) --> (\S+?):", diagram, re.MULTILINE)
    assert len(arrows) == diagram.count("-->")
    left, entered = ({arrow[end] for arrow in arrows} - {"[*]"} for end in (0, 1))
    assert left == entered
    return left


def test_the_state_diagrams_know_every_state() -> None:
    records, closed_groups = blocks(page("decisions"), "mermaid")
    assert drawn(records) == set(State)
    shut = (
        ClosedGroup("g", 1, 30.0, "rate_limited"),
        ClosedGroup("g", 1, 0.0, ""),
        ClosedGroup("g", 1, 0.0, "", probe="t", probe_for=9.0),
    )
    assert drawn(closed_groups) == {
        "open",
        *(status_of_group(closed_group, 0.0).state for closed_group in shut),
    }


def test_the_task_events_are_sent_under_their_names() -> None:
    source = "".join(path.read_text() for path in (ROOT / "celery_leases").rglob("*.py"))
    rows = [
        row[:2]
        for row in markdown_rows(section(page("events"), "Task events, for Flower and others"))[1:]
    ]
    assert len(rows) == 5
    for event, state in rows:
        name = event.strip("`").removeprefix("task-")
        assert f'"{name}"' in source
        watched = WatchedTask(state="STARTED")
        watched.event(name, 0.0)
        assert watched.state == state
        watched.event("started", 1.0)
        assert watched.state == state  # as the page says: it stays until the call ends


# -- examples --------------------------------------------------------------------------------------


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the examples of the README, and of the pages on the status and on signals,
    define.
    """
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    signals_of_page = blocks(page("monitor"), "python")[-1]
    first, *others = [
        *blocks("".join([README, page("show-retry-available")]), "python"),
        signals_of_page,
    ]
    stores = (
        'app.conf.leases_url = "redis://localhost/2"\n'
        'app.conf.leases_database_url = "postgresql+psycopg://localhost/billing"\n'
    )
    first = re.sub(r"^(app = Celery.*\n)", rf"\1{stores}", first, flags=re.MULTILINE)
    source = eagerly("".join([first, *others]), tmp_path, "postgresql+psycopg://localhost/billing")
    with executed(source, "billing") as names:
        yield names
        signals.crash_seen.disconnect(names["tell_of_crash"])
        signals.attempt_settled.disconnect(names["alert"])


def test_the_first_example_sends_one_mail_for_two_calls(readme: dict[str, Any], capsys) -> None:
    (command,) = re.findall(r"python -c '(.*)'", README)
    printing = command.partition("; ")[2]
    exec(printing, {"s": readme["send_invoice"]})  # noqa: S102 - our own page
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["mail: customer 1842, 2026-04", "{'customer': 1842} {'customer': 1842}"]


def test_the_readme_is_short() -> None:
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10
    assert len(README.splitlines()) <= 150
    assert len(README.encode()) <= 9000


def test_the_status_example_shows_the_state_of_an_invoice(readme: dict[str, Any]) -> None:
    readme["send_invoice"].delay(1842, "2026-04")
    assert readme["invoice_state"](1842, "2026-04") == (
        "done",
        "Done",
        {"customer": 1842},
    )
    assert readme["invoice_state"](1, "2026-04") == ("absent", "Not started yet", None)
    assert readme["send_invoice"].lease_status(1842, "2026-04").state == "done"


def test_the_signal_example_receives_a_crash(readme, capsys) -> None:
    crash = CrashSeen(task="t", key="invoice:1:2026-04", call_id="c", crashes=2, host="h/1")
    signals.Announcer().observe(crash)
    assert capsys.readouterr().out == "invoice:1:2026-04: 2 crashes in a row, the last on h/1\n"


def test_the_alert_example_reports_failures_that_need_an_operator(capsys) -> None:
    names: dict[str, Any] = {}
    (source,) = (block for block in blocks(page("monitor"), "python") if "def alert" in block)
    exec(source, names)  # noqa: S102 - our own page
    told: dict[str, Any] = {
        "task": "t", "call_id": "c", "ended": "failed", "attempt": 1, "runtime": 0.1,
    }  # fmt: skip
    for key, state, operator in (
        ("a", "cooling", False),
        ("b", "cooling", True),
        ("c", "failed", False),
    ):
        failure = Failure("E", "no credit", "r", "out_of_quota", operator=operator)
        signals.Announcer().observe(AttemptSettled(key=key, state=state, failure=failure, **told))
    signals.attempt_settled.disconnect(names["alert"])
    signals.crash_seen.disconnect(names["tell_of_crash"])
    assert capsys.readouterr().out.splitlines() == [
        "b is cooling: no credit (out_of_quota)",
        "c is failed: no credit (out_of_quota)",
    ]


def test_a_renamed_task_answers_with_what_was_done_under_the_old_name(tmp_path: Path) -> None:
    (source,) = blocks(section(page("keys"), "Renaming a task"), "python")
    with executed(_renamed(source, tmp_path, old=True), "billing") as before:
        done = before["app"].tasks["billing.send"].apply((7,))
        assert done.get() == {"invoice": 7, "run": 1}
    with executed(_renamed(source, tmp_path), "billing") as after:
        tasks = after["app"].tasks
        for name in ("billing.send_invoice", "billing.send"):
            assert tasks[name].apply((7,)).get() == {"invoice": 7, "run": 1}
            assert tasks[name].lease_status(7).state == "done"
            assert after["app"].tasks[name].apply((name,)).get() == {"invoice": name, "run": 1}
        client = LeaseClient("database", after["app"].conf.leases_database_url)
        assert client.status("/billing.send/invoice:7").state == "done"
        assert client.status("invoice:7", task="billing.send_invoice").state == "absent"


def test_five_calls_are_one_run_and_the_key_is_free_afterwards(tmp_path, monkeypatch) -> None:
    (source,) = blocks(page("comparison"), "python")
    eager = "app.conf.leases_eager_stores = True\napp.conf.leases_url = 'database'\nruns = []\n"
    source = source.replace(
        "postgresql+psycopg://localhost/shop", f"sqlite:///{tmp_path / 'records.db'}"
    )
    source = source.replace(
        "app.conf.leases_database_url", f"{eager}app.conf.leases_database_url", 1
    )
    source = source.replace(
        'return {"shop": shop}', 'runs.append(report.apply((shop,)).state); return {"shop": shop}'
    )
    with executed(source, "shop") as names:
        states = [names["report"].apply(("north",)).state for _ in range(5)]
        assert states == ["SUCCESS", *["IGNORED"] * 4]
        assert names["runs"] == ["IGNORED"]  # one that came during the run
        later = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: later() + 181 * 10**9)
        assert names["report"].apply(("north",)).state == "SUCCESS"
        assert len(names["runs"]) == 2


def _renamed(source: str, tmp_path: Path, *, old: bool = False) -> str:
    """The example on stores that stay; *old*: as the task was before it had a shared key and
    another name.
    """
    url = f"sqlite:///{tmp_path / 'records.db'}"
    conf = f'app.conf.update(leases_url="database", leases_database_url="{url}", leases_eager_stores=True)'
    source = source.replace("\n\n\ndef send", f"\n{conf}\nruns = []\n\n\ndef send")
    source = source.replace(
        'return {"invoice": customer_id}',
        'runs.append(customer_id); return {"invoice": customer_id, "run": runs.count(customer_id)}',
    )
    if old:
        source = source.replace("/billing.send/invoice", "invoice")
    assert conf in source
    assert "runs.append" in source
    assert ("/billing.send/" in source) is not old
    return source


def test_the_eager_example_for_unit_tests_passes() -> None:
    with executed(blocks(page("eager-mode"), "python")[0], "shop") as names:
        examples = [value for name, value in names.items() if name.startswith("test_")]
        assert len(examples) == 2
        for example in examples:
            example()
        assert names["ship"](9) == {"attempt": 0}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_python_block_compiles(path: Path) -> None:
    for block in blocks(path.read_text(), "python"):
        compile(block, path.name, "exec")


def test_every_public_name_that_is_mentioned_exists() -> None:
    for path in PAGES:
        text = path.read_text()
        for module, names in re.findall(
            r"^from (celery_leases[\w.]*) import ([\w, ]+)$", text, re.MULTILINE
        ):
            try:
                imported = __import__(module, fromlist=["*"])
            except ModuleNotFoundError:  # of a framework that is not installed here
                if not module.startswith(("celery_leases.django", "celery_leases.web.")):
                    raise
                continue
            assert all(hasattr(imported, name.split()[0]) for name in names.split(",")), (
                path.name,
                module,
                names,
            )
    for name in celery_leases.__all__:
        assert getattr(celery_leases, name)


# -- links -----------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """What can be linked to within a page."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_within_the_project_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_code_names_pages_that_exist() -> None:
    modules = (ROOT / "celery_leases").rglob("*.py")
    named = {
        name for path in modules for name in re.findall(r"docs/[\w/.-]+\.md", path.read_text())
    }
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_index_lists_every_page() -> None:
    index = page("index")
    assert len(index.splitlines()) <= 45
    docs = ROOT / "docs"
    for path in docs.rglob("*.md"):
        assert path.name == "index.md" or f"({path.relative_to(docs)})" in index, path.name
