"""The pages of the documentation, taken apart for tests: their blocks, tables and sections, and
their examples run.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import celery._state

from celery_leases.decide import before_run as decisions
from celery_leases.decide.verdicts import Verdict

ROOT = Path(__file__).parents[2]
TOP = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()


def page(name: str) -> str:
    """The text of one page of ``docs``, by its name without the folder."""
    (path,) = (ROOT / "docs").rglob(f"{name}.md")
    return path.read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def markdown_rows(text: str) -> list[list[str]]:
    """The rows of all tables of a Markdown text, without the lines below their heads."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line)
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def rest_rows(text: str) -> list[list[str]]:
    """The rows of the two-column tables of a docstring, joined where a cell spans lines, in
    Markdown's spelling.

    A line continues the one before when its first cell is empty, or when the one before had nothing
    to say yet.
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
        assert not line[edge - 2 : edge].strip(), f"not a row of the table: {line}"
        left, right = line[:edge].strip(), line[edge:].strip()
        if rows and inside == 2 and (not left or not rows[-1][1]):
            rows[-1] = [f"{rows[-1][0]} {left}".strip(), f"{rows[-1][1]} {right}".strip()]
        else:
            rows.append([left, right])
    return [[cell.replace("``", "`") for cell in row] for row in rows]


def with_decisions(text: str) -> str:
    """docs/reference/decisions.md, whose first two tables are those of the docstring of the
    decisions, and the third those of the verdicts; ``python -m tests.unit.reference_pages`` writes
    them.
    """
    verdicts = [
        f"| `{one.__name__}` | {inspect.cleandoc(one.__doc__ or '')} |\n"
        for one in get_args(Verdict)
    ]
    of_verdicts = re.sub(r"\n\n[^|]*(?= \|\n)", "", "".join(verdicts))
    of_verdicts = re.sub(r"\n(?!\|)", " ", of_verdicts).replace("``", "`") + "\n"
    parts = (decisions.__doc__ or "").split("\nAfter the run\n")
    found = [[f"| {left} | {right} |\n" for left, right in rest_rows(part)] for part in parts]
    written = ["".join([head, "|---|---|\n", *rows]) for head, *rows in found]
    tables = iter([*written, f"| verdict | what happens |\n|---|---|\n{of_verdicts.strip()}\n"])
    return re.sub(r"(?:^\|.*\n)+", lambda _: next(tables), text, count=3, flags=re.MULTILINE)


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert level, f"no heading {title!r}"
    rest = text[level.end() :]
    return re.split(rf"^#{{1,{len(level[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@contextmanager
def executed(source: str, name: str) -> Iterator[dict[str, Any]]:
    """The names that *source* defines as a module; its tasks do not turn up in the apps of other
    tests.
    """
    finalizers = set(celery._state._on_app_finalizers)
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), names)  # noqa: S102 - our own pages
    yield names
    names["app"].close()
    celery._state._deregister_app(names["app"])
    celery._state._on_app_finalizers.intersection_update(finalizers)


def eagerly(source: str, tmp_path: Path, database: str) -> str:
    """An example of a page, to be run eagerly and with the stores of this machine."""
    eager = "app.conf.task_always_eager = app.conf.task_eager_propagates = app.conf.leases_eager_stores = True\n"
    for theirs, ours in (
        (database, f"sqlite:///{tmp_path / 'records.db'}"),
        ('"redis://localhost/2"', '"database"'),
        ("app.conf.leases_url", f"{eager}app.conf.leases_url"),
    ):
        assert theirs in source
        source = source.replace(theirs, ours)
    return source
