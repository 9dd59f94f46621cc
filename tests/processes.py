"""Runs tests in several processes: ``pytest --processes 5``.

One process collects the tests, which takes as long as hundreds of them, and forks the others. Each
of them runs groups of tests, and gets the next group when it has none. Most of the time of a test
with workers is waiting, so all processes but one begin with such tests; the last one begins with
the others, which need the time of a processor. Towards the end, a process without tests gets half
of those of another one.

A test that ends its process fails, and a new process runs those that would have come next.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import UnsupportedOperation
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests.combinations import SAMPLED, Place


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--processes``, the number of processes that run tests."""
    parser.getgroup("celery_leases").addoption(
        "--processes", type=int, default=1, help="run the tests in so many processes (default: 1)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests in several processes if the command line says so."""
    if (number := config.getoption("--processes")) > 1:
        config.pluginmanager.register(Processes(number))


Group = deque[int]
"""Tests by their numbers in the session, in their order."""


def grouped(items: Sequence[pytest.Item]) -> tuple[deque[Group], deque[Group]]:
    """The groups with workers, the largest first, and the others in their order.

    Tests of one module are in one group; tests with workers, if they are on one combination too.
    """

    def of(numbered: tuple[int, pytest.Item]) -> tuple[Any, ...]:
        item = numbered[1]
        place = Place.of(item) if item.path.parent.name in SAMPLED else None
        return item.path, sorted(place.parts) if place else []

    slow: list[Group] = []
    quick: deque[Group] = deque()
    for (path, _), numbered in groupby(sorted(enumerate(items), key=of), key=of):
        group = Group(number for number, _ in numbered)
        (slow if path.parent.name in SAMPLED else quick).append(group)
    return deque(sorted(slow, key=len, reverse=True)), quick


class _Child:
    """A process that runs tests, as the first process sees it."""

    def __init__(self, begins: deque[Group], goes_on: deque[Group]) -> None:
        self.queues = begins, goes_on
        self.group = Group()
        #: The test that runs, and the one after it, which pytest must know to end a fixture.
        self.given: deque[int] = deque()
        self.pid = 0
        self.pipe: Any = None
        self.closed = False

    def next_test(self, others: Iterable[_Child]) -> int | None:
        """The next test, from its group, from another group, or from another process."""
        if not self.group:
            if queue := next(filter(None, self.queues), None):
                self.group = queue.popleft()
            else:
                largest = max((child.group for child in others), key=len)
                while len(self.group) < len(largest):
                    self.group.appendleft(largest.pop())
        return self.group.popleft() if self.group else None

    def give(self, others: Iterable[_Child]) -> None:
        """Send the next test, or ``None`` once, after the last one."""
        if not self.closed:
            number = self.next_test(others)
            self.closed = number is None
            if number is not None:
                self.given.append(number)
            with suppress(ConnectionError):  # it has just ended, and will be found so
                self.pipe.send(number)


class Processes:
    """The plugin that runs the tests of a session in *number* processes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False
        # Else each child would make this directory, and remove that of another one.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        slow, quick = grouped(session.items)
        children = [_Child(slow, quick) for _ in range(self.number - 1)]
        children.append(_Child(quick, slow))
        for child in children:
            self._fork(child, children, session)
        try:
            self._hear(children, session)
        finally:  # when the run ends early, the guards of the children end what they started
            for child in children:
                if child.pid:
                    os.kill(child.pid, signal.SIGTERM)
                    os.waitpid(child.pid, 0)
        return True

    def _hear(self, children: list[_Child], session: pytest.Session) -> None:
        """Report what the children send, and give them tests, until all have ended."""
        while running := {child.pipe: child for child in children if child.pid}:
            for pipe in wait(running):
                child = running[pipe]
                try:
                    what, *values = child.pipe.recv()
                except (EOFError, ConnectionError):
                    if self._has_left_tests(child, session):
                        self._fork(child, children, session)
                    continue
                if what == "warning":
                    session.config.hook.pytest_warning_recorded.call_historic(kwargs=values[0])
                elif what == "report":
                    _report(session, values[0])
                else:
                    child.given.popleft()
                    child.give(children)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)

    def _fork(self, child: _Child, all_of_them: list[_Child], session: pytest.Session) -> None:
        child.pipe, its = Pipe()
        child.closed = False
        number = all_of_them.index(child)
        child.pid = os.fork()
        if not child.pid:
            code = 1
            try:
                for each in all_of_them:
                    if each.pipe is not None:
                        each.pipe.close()
                _run(session, its, number)
                code = 0
            finally:
                os._exit(code)  # the guards end what it has started
        its.close()
        child.give(all_of_them)
        child.give(all_of_them)

    @staticmethod
    def _has_left_tests(child: _Child, session: pytest.Session) -> bool:
        """Collect a child that has ended; whether another one must take over its tests."""
        child.pipe.close()
        _, status = os.waitpid(child.pid, 0)
        child.pid = 0
        if not child.given:
            return bool(child.group)
        item = session.items[child.given.popleft()]
        code = os.waitstatus_to_exitcode(status)
        why = f"the process that ran {item.nodeid} ended with {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        to_data = session.config.hook.pytest_report_to_serializable
        _report(session, to_data(config=session.config, report=report))
        child.group.extendleft(reversed(child.given))
        child.given.clear()
        return True


def _report(session: pytest.Session, data: dict[str, Any]) -> None:
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=data)
    hook.pytest_runtest_logreport(report=report)
    if report.when == "teardown":
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


class _Sender:
    """Sends what the tests of a child report."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self.config.hook.pytest_report_to_serializable
        self.pipe.send(("report", to_data(config=self.config, report=report)))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        seen = warning_message
        message = warnings.WarningMessage(
            str(seen.message), seen.category, seen.filename, seen.lineno
        )
        names = {"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
        self.pipe.send(("warning", names))


class _Terminal:
    """Instead of the reporter, which only the first process has, for who writes to the terminal."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


def _run(session: pytest.Session, pipe: Connection, number: int) -> None:
    """Run, in a child, the tests that the first process sends, until it sends ``None``."""
    config = session.config
    # The name is from pytest-xdist: plugins know by it that another process reports.
    config.workerinput = {"workerid": f"process-{number}"}  # type: ignore[attr-defined]
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"process-{number}-{os.getpid()}"
    factory._basetemp.mkdir()
    plugins = config.pluginmanager
    captured: Any = plugins.get_plugin("capturemanager")._global_capturing  # type: ignore[union-attr]
    for each in filter(None, (captured.out, captured.err)):
        # All processes would write to one file. It stays open, as modules have bound sys.stdout.
        with suppress(UnsupportedOperation), TemporaryFile() as own:
            os.dup2(own.fileno(), each.tmpfile.fileno())
    reporter: Any = plugins.unregister(name="terminalreporter")
    plugins.register(_Terminal(reporter._tw), "terminalreporter")
    plugins.register(_Sender(config, pipe))
    current = pipe.recv()
    while current is not None:
        after = pipe.recv()
        following = None if after is None else session.items[after]
        item = session.items[current]
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("done",))
        current = after
