"""The documentation says what the code does: its tables are compared, its examples run, its links lead somewhere."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import pytest

import celery_leases
from celery_leases import cli, signals
from celery_leases.core import decisions
from celery_leases.core.options import OPTION_NAMES, LeaseOptions
from celery_leases.core.policies import CooldownPolicy
from celery_leases.core.records import Ended, State
from celery_leases.wiring import _SETTINGS, read_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def markdown_rows(text: str) -> list[list[str]]:
    """The rows of all tables of a Markdown text, without the lines below their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def rest_rows(text: str) -> list[list[str]]:
    """The rows of the two-column tables of a docstring, joined where a cell spans lines, in Markdown's spelling.

    A line continues the one before when its first cell is empty, or when the one before had nothing to say yet.
    """
    rows: list[list[str]] = []
    edge = inside = 0
    for line in text.splitlines():
        if re.fullmatch(r"=+ +=+", line):
            edge, inside = line.rindex(" ") + 1, inside + 1
            continue
        if not line.strip():
            inside = 0
        if not inside:
            continue
        left, right = line[:edge].strip(), line[edge:].strip()
        if rows and inside == 2 and (not left or not rows[-1][1]):
            rows[-1] = [f"{rows[-1][0]} {left}".strip(), f"{rows[-1][1]} {right}".strip()]
        else:
            rows.append([left, right])
    return [[cell.replace("``", "`") for cell in row] for row in rows]


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert level, f"no heading {title!r}"
    rest = text[level.end() :]
    return re.split(rf"^#{{1,{len(level[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def spelled(name: str, value: object) -> str:
    """A default as the option table writes it."""
    if name in ("ttl", "wait", "settle_timeout"):
        return f"{value:g} s"
    if isinstance(value, CooldownPolicy):
        return f"{value.base:g} s, doubling to {value.cap / 3600:g} h"
    if name == "retention":
        assert isinstance(value, float)
        return f"{value / 86_400:g} days"
    if name == "result_max":
        return f"{value} bytes"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value}`" if isinstance(value, bool) else str(value)


# -- tables ------------------------------------------------------------------------------------------------


def test_the_decision_tables_are_those_of_the_code() -> None:
    """docs/decisions.md draws the tables of the docstring again, row by row."""
    docstring = rest_rows(decisions.__doc__ or "")
    assert len(docstring) > 15
    page = markdown_rows(section((ROOT / "docs/decisions.md").read_text(), "The tables"))
    assert page == docstring


def test_the_option_table_names_every_option_with_its_default() -> None:
    """The README has all options, no other ones, and their defaults."""
    rows = {row[0].strip("`"): row[1] for row in markdown_rows(section(README, "Task options"))[1:]}
    assert rows.keys() == {f"lease_{name}" for name in OPTION_NAMES}
    worded = {
        "key": "none",
        "fingerprint": "all arguments but defaults",
        "max_hold": "`time_limit`, else 24 h",
        "on_cooldown": '`"fail"`',
        "cooldown_group": "none",
        "rules": "`Rules.default()`",
    }
    for name, default in ((field.name, getattr(LeaseOptions(), field.name)) for field in fields(LeaseOptions)):
        assert rows[f"lease_{name}"] == worded.get(name, spelled(name, default))
    assert LeaseOptions().max_hold == 24 * 3600


def test_the_settings_table_names_every_setting() -> None:
    """The README has all settings that are not defaults of options."""
    rows = {row[0].strip("`"): row[1] for row in markdown_rows(section(README, "Settings"))[1:]}
    assert rows.keys() == {f"leases_{name}" for name in _SETTINGS}
    local = read_settings({}, "redis://localhost//")
    assert local.database_url in rows["leases_database_url"]
    assert local.prefix in rows["leases_prefix"]


def test_the_signals_table_names_every_signal_with_its_fields_and_level() -> None:
    """docs/operating.md has every signal, what its event carries, and how loud its log line is."""
    rows = {row[0].strip("`"): row for row in markdown_rows(section(operating(), "Signals"))[1:]}
    known = {signal.name: (event, level) for event, (signal, level, _) in signals._SIGNALS.items()}
    assert rows.keys() == known.keys()
    for name, (event, level) in known.items():
        own = [field.name for field in fields(event) if field.name not in ("task", "key", "call_id")]
        assert re.findall(r"`(\w+)`", rows[name][2]) == own, name
        assert rows[name][3] == {10: "DEBUG", 20: "INFO", 30: "WARNING"}[level], name


def test_the_state_diagrams_know_every_state() -> None:
    """docs/decisions.md draws the states of a record, and those of a gate."""
    records, gates = (
        {name for arrow in re.findall(r"^ *(\S+) --> (\w+)", diagram, re.MULTILINE) for name in arrow if name != "[*]"}
        for diagram in blocks((ROOT / "docs/decisions.md").read_text(), "mermaid")
    )
    assert records == set(State)
    assert gates == {"open", "closed", "half_open", "probing"}


def test_every_way_an_attempt_ends_is_explained() -> None:
    """docs/operating.md says what each ``ended`` means."""
    rows = {row[0].strip("`") for row in markdown_rows(section(operating(), "How attempts end"))[1:]}
    assert rows == set(Ended)


def test_every_command_is_shown() -> None:
    """docs/operating.md walks through every subcommand."""
    for name in cli.leases.commands:
        assert f"leases {name}" in operating()


def operating() -> str:
    """The page for operators."""
    return (ROOT / "docs/operating.md").read_text()


# -- examples ----------------------------------------------------------------------------------------------


@contextmanager
def executed(source: str, name: str) -> Iterator[dict[str, Any]]:
    """The names that *source* defines as a module; its tasks do not turn up in the apps of other tests."""
    finalizers = set(celery._state._on_app_finalizers)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), names)  # noqa: S102 - our own pages
    yield names
    names["app"].close()
    celery._state._deregister_app(names["app"])
    celery._state._on_app_finalizers.intersection_update(finalizers)


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names the README's examples define, executed in their order, eagerly and with the stores of this machine."""
    invoices: Any = ModuleType("invoices")
    invoices.rendered, invoices.mailed = [], []
    invoices.render = lambda *customer: invoices.rendered.append(customer) or b"%PDF-"
    invoices.mail = lambda *letter: invoices.mailed.append(letter)
    monkeypatch.setitem(sys.modules, "invoices", invoices)
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    source = "".join(blocks(README, "python"))
    eager = "app.conf.task_always_eager = app.conf.task_eager_propagates = app.conf.leases_eager_stores = True\n"
    for theirs, ours in (
        ("postgresql+psycopg://localhost/billing", f"sqlite:///{tmp_path / 'records.db'}"),
        ('"redis://localhost/2"', '"database"'),
        ("app.conf.leases_url", f"{eager}app.conf.leases_url"),
    ):
        assert theirs in source
        source = source.replace(theirs, ours)
    with executed(source, "billing") as names:
        yield {**names, "invoices": invoices}
        signals.crash_seen.disconnect(names["tell_somebody"])


def test_the_first_example_sends_one_mail_for_two_calls(readme: dict[str, Any]) -> None:
    """Its two calls at the end have run: one body, and a third call gets the first result."""
    assert readme["invoices"].mailed == [(1842, b"%PDF-")]
    assert readme["send_invoice"].delay(1842, month="2026-04").get() == {"customer": 1842, "bytes": 5}
    assert readme["invoices"].rendered == [(1842, "2026-04")]


def test_the_first_example_is_about_twenty_lines() -> None:
    """As the README says of itself."""
    lines = [line for line in blocks(README, "python")[0].splitlines() if line.strip()]
    assert 15 <= len(lines) <= 22


def test_the_status_example_tells_where_an_invoice_stands(readme: dict[str, Any]) -> None:
    """The client sees what the task did, and knows nothing of other invoices."""
    assert readme["invoice_state"](1842, "2026-04") == ("done", "Done", {"customer": 1842, "bytes": 5})
    assert readme["invoice_state"](1, "2026-04") == ("absent", "Not started yet", None)
    assert readme["send_invoice"].lease_status(1842, "2026-04").state == "done"


def test_the_signal_example_receives_a_crash(readme: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The receiver is called with an event as the code makes it."""
    from celery_leases.core.events import CrashSeen

    crash = CrashSeen(task="t", key="invoice:1:2026-04", call_id="c", crashes=2, host="h/1")
    signals.Announcer().observe(crash)
    assert capsys.readouterr().out == "invoice:1:2026-04: 2 crashes in a row, the last on h/1\n"


def test_the_eager_example_for_unit_tests_passes() -> None:
    """docs/testing.md shows two tests; they pass."""
    with executed(blocks((ROOT / "docs/testing.md").read_text(), "python")[0], "shop") as names:
        examples = [value for name, value in names.items() if name.startswith("test_")]
        assert len(examples) == 2
        for example in examples:
            example()
        assert names["ship"](9) == {"attempt": 0}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles(page: Path) -> None:
    """No example has a syntax error."""
    for block in blocks(page.read_text(), "python"):
        compile(block, page.name, "exec")


def test_every_public_name_that_is_mentioned_exists() -> None:
    """What the pages write as ``celery_leases.name`` or import from there can be imported."""
    for page in PAGES:
        text = page.read_text()
        for module, names in re.findall(r"^from (celery_leases[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
            imported = __import__(module, fromlist=["*"])
            assert all(hasattr(imported, name.strip()) for name in names.split(",")), (page.name, module, names)
    for name in celery_leases.__all__:
        assert getattr(celery_leases, name)


# -- links -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What can be linked to within a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    """Files and headings that are linked to exist."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_index_lists_every_page() -> None:
    """docs/README.md fits one screen and leads to all pages."""
    index = (ROOT / "docs/README.md").read_text()
    assert len(index.splitlines()) <= 40
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
