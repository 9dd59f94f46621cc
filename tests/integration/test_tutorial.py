"""docs/tutorial/first-task.md, done as it says: with a real Redis and real workers."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess
from tests.unit.doc_pages import ROOT, blocks, page


class Reader:
    """Who does what the page says, each command in a terminal of its own."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        text = page("first-task")
        (source,) = blocks(text, "python")
        source = re.sub(r"redis://localhost/\d", redis_url, source)
        (folder / "reports.py").write_text(source)
        self.commands = re.findall(r"^    \.venv/bin/(\w+ .*)$", text, re.MULTILINE)[1:]
        self.terminals: list[GuardedProcess] = []

    def run(self, word: str) -> GuardedProcess:
        """Start the first of the page's commands that contains the word."""
        program, *args = shlex.split(next(line for line in self.commands if word in line))
        module = ["-m", "celery"] if program == "celery" else []
        started = GuardedProcess(
            [sys.executable, *module, *args],
            log=self.folder / f"terminal-{len(self.terminals)}.log",
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}", "PYTHONUNBUFFERED": "1"},
            forked=False,
        )
        self.terminals.append(started)
        return started


@pytest.fixture
def reader(tmp_path: Path, leases_redis_url: str):
    reader = Reader(tmp_path, leases_redis_url)
    yield reader
    for terminal in reader.terminals:
        terminal.end()


def pages(worker: GuardedProcess) -> list[tuple[int, int]]:
    """The pages that a worker has printed, each with its attempt."""
    found = re.findall(r"report 7, page (\d+), attempt (\d+)", worker.logs())
    return [(int(number), int(attempt)) for number, attempt in found]


def test_a_killed_workers_report_goes_on_and_a_refused_summary_waits(reader: Reader) -> None:
    one, two = reader.run("one@"), reader.run("two@")
    ordered = reader.run("report.delay")
    wait_until(lambda: len(pages(one) + pages(two)) > 3, 40, "pages of the report")
    killed, other = (one, two) if pages(one) else (two, one)
    killed.send(signal.SIGKILL, tree=True)
    killed.wait(10)
    refused = reader.run("summarize.delay")
    assert ordered.wait(70) == 0
    assert "{'report': 7, 'pages': 20}" in ordered.logs()
    last, rest = pages(killed)[-1][0], pages(other)
    assert rest[0][0] in (last - 1, last, last + 1), "it goes on where the first one died"
    assert [number for number, _ in rest] == list(range(rest[0][0], 21))
    assert {attempt for _, attempt in rest} == {2}

    again = reader.run("report.delay")
    assert again.wait(20) == 0
    assert len(pages(other)) == len(rest), "the work is done"
    shown = reader.run("leases show")
    assert shown.wait(20) == 0
    assert re.search(r"state +done", shown.logs())

    wait_until(lambda: "rate_limited" in other.logs(), 30, "the refusal in the log")
    while_it_waits = reader.run("summarize.delay")
    assert while_it_waits.wait(30) != 0
    assert "Retry available in" in while_it_waits.logs()
    (reader.folder / "paid").touch()
    assert refused.wait(60) == 0
    assert "{'summary': 7}" in refused.logs()
