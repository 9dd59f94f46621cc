"""Runs the tests that reach a mutation in a fork of the process that has collected them all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import selectors
import signal
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants.mutations import ROOT, Functions, Mutation, apply, imported_functions, path_of
from tests.simulation.search import run

SHORTEST_LIMIT = 5
"""Seconds of CPU after which the tests of a mutation are ended, at least: it may loop for ever."""
LONGEST_WAIT = 15.0
"""Seconds without any CPU after which they are ended: a mutation may wait for ever."""
SLOWEST_TEST = 2.0
"""Seconds of CPU of a test above which it judges no mutation."""
BUILT_ONCE = "celery_leases.stores.sql.record_statements"
ROWS = "celery_leases.stores.sql.rows"
"""The statements are built for the first test that needs them; each that reads or writes rows
executes some.
"""
MOST_TIME = 4.0
"""Seconds of CPU for the tests of one mutation; the fastest are chosen."""


@dataclass
class Outcome:
    """What became of one mutation: *how* is empty if nothing noticed it."""

    name: str
    module: str
    function: str
    how: str
    tests: int
    seconds: float


@dataclass
class Reach:
    """Which lines of the mutated modules a test or a seed of the simulator runs, and how many
    seconds of CPU it takes.
    """

    test: pytest.Item | int
    seconds: float
    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def runs(self, mutation: Mutation) -> bool:
        """Whether it runs the statement of the mutation; each test runs what imports do."""
        if not mutation.function:
            return mutation.module in self.lines
        if mutation.module == BUILT_ONCE:
            return ROWS in self.lines
        lines = self.lines.get(mutation.module, set())
        return any(line in lines for line in range(mutation.first_line, mutation.last_line + 1))

    @property
    def name(self) -> str:
        """The id of the test, or the seed."""
        return f"seed {self.test}" if isinstance(self.test, int) else self.test.nodeid


class Mutants:
    """The plugin of pytest that runs *chosen* instead of the session; *seeds* of the simulator
    judge what no test notices. It begins no mutation after *until*, by the monotonic clock, and
    calls *note* now and then.
    """

    def __init__(
        self,
        chosen: Sequence[Mutation],
        modules: Sequence[str],
        seeds: int,
        processes: int,
        until: float = math.inf,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        self.note = note
        self.chosen = chosen
        self.until = until
        self.seeds = seeds
        self.processes = processes
        self.outcomes: list[Outcome] = []
        self.tests = 0
        self._session: pytest.Session
        self._modules = {str(path_of(each)): each for each in modules}

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Let hypothesis try the same examples each time, and not look for a shorter one."""
        settings.register_profile(
            "mutants",
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=30,
            phases=(Phase.explicit, Phase.generate),
        )

    def pytest_collectstart(self) -> None:
        """Use that profile, whatever the tests have loaded."""
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """See what each test reaches, then run the mutations."""
        reporter: Any = session.config.pluginmanager.unregister(name="terminalreporter")
        session.config.pluginmanager.register(_Terminal(reporter._tw), "terminalreporter")
        # Else each child would make this directory, and remove that of another one.
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._session = session
        reaches = self._reaches(session)
        self.tests = sum(not isinstance(each.test, int) for each in reaches)
        kills: Counter[Any] = Counter()

        def first_killers(mutation: Mutation) -> list[Reach]:
            """What reaches it: the fast tests first, and those that have noticed much so far, most
            of all in the same function; the seeds last.
            """

            def order(each: Reach) -> tuple[bool, float]:
                near = kills[mutation.module, mutation.function, each.name]
                noticed = 1 + kills[each.name] + 100 * near
                return isinstance(each.test, int), each.seconds / noticed

            found = sorted((each for each in reaches if each.runs(mutation)), key=order)
            seeds = [each for each in found if isinstance(each.test, int)]
            spent = list(accumulate(each.seconds for each in found))
            return found[: min(bisect_right(spent, MOST_TIME), len(found) - len(seeds))] + seeds

        in_time = takewhile(lambda _: time.monotonic() < self.until, self.chosen)
        jobs = ((each, first_killers(each)) for each in in_time)
        for number, outcome in enumerate(self._played(jobs), 1):
            self.outcomes.append(outcome)
            if number % 10 == 0:
                self.note()
            kills[outcome.how] += 1
            kills[outcome.module, outcome.function, outcome.how] += 1
            if not outcome.how or number % 50 == 0:
                told = f"survives: {outcome.name}" if not outcome.how else ""
                print(f"{number}/{len(self.chosen)} {told}", file=sys.stderr, flush=True)
        return True

    # -- what each test reaches ------------------------------------------------------------------

    def _reaches(self, session: pytest.Session) -> list[Reach]:
        """The tests that pass and reach a mutated module, by a file of an earlier run with the same
        sources if there is one.
        """
        digest = hashlib.sha256(" ".join(item.nodeid for item in session.items).encode())
        digest.update(str(self.seeds).encode())
        for path in sorted({*self._modules, *(str(item.path) for item in session.items)}):
            digest.update(Path(path).read_bytes())
        known = ROOT / "build" / "mutants" / f"reach-{digest.hexdigest()[:16]}.json"
        if not known.exists():
            tests = list(enumerate([*session.items, *range(1, self.seeds + 1)]))
            parts = [tests[first :: self.processes] for first in range(self.processes)]
            forks = [_forked(partial(self._trace, session, part)) for part in parts]
            with ThreadPoolExecutor() as threads:
                traced = [
                    each for some in threads.map(list, map(_lines_of, forks)) for each in some
                ]
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps(traced))
        found: list[Reach] = []
        for number, seconds, lines in json.loads(known.read_text()):
            seed = number - len(session.items)
            each = Reach(session.items[number] if seed < 0 else seed + 1, seconds)
            for module, some in lines.items():
                each.lines[module] = set(some)
            found.append(each)
        return sorted(found, key=lambda each: each.seconds)

    def _trace(
        self, session: pytest.Session, tests: Sequence[tuple[int, pytest.Item | int]]
    ) -> Iterator[Any]:
        for number, test in tests:
            lines: dict[str, set[int]] = defaultdict(set)
            trace = _tracer(self._modules, lines)
            began = time.process_time()
            threading.settrace(trace)
            sys.settrace(trace)
            try:
                failed = _fails(session, [Reach(test, 0.0)])
            finally:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
            seconds = time.process_time() - began
            if failed is None and lines and (isinstance(test, int) or seconds < SLOWEST_TEST):
                yield [number, seconds, {module: sorted(each) for module, each in lines.items()}]

    # -- the mutations ---------------------------------------------------------------------------

    def _played(self, jobs: Iterable[tuple[Mutation, list[Reach]]]) -> Iterator[Outcome]:
        """Run the jobs, some at a time."""
        waiting, functions = iter(jobs), imported_functions()
        running: dict[int, tuple[_Fork, Mutation, int, float]] = {}
        with selectors.DefaultSelector() as selector:
            while True:
                while len(running) < self.processes and (job := next(waiting, None)):
                    mutation, reaches = job
                    limit = 5 * sum(each.seconds for each in reaches)
                    fork = _forked(
                        partial(self._judge, mutation, reaches, functions),
                        max(SHORTEST_LIMIT, int(limit)),
                    )
                    running[fork.output] = fork, mutation, len(reaches), time.monotonic()
                    selector.register(fork.output, selectors.EVENT_READ)
                if not running:
                    return
                ready = {key.fd for key, _ in selector.select(1.0)}
                for output in list(running):
                    fork, mutation, tests, began = running[output]
                    if output not in ready and not fork.stands_still():
                        continue
                    selector.unregister(output)
                    del running[output]
                    said = list(_lines_of(fork)) if output in ready else []
                    fork.end()
                    how = said[0] if said else "its tests do not end"
                    seconds = time.monotonic() - began
                    module, function = mutation.module, mutation.function
                    yield Outcome(mutation.name, module, function, how, tests, seconds)

    def _judge(
        self, mutation: Mutation, reaches: list[Reach], functions: Functions
    ) -> Iterator[str]:
        """Yield what notices the mutation, or an empty text."""
        try:
            apply(mutation, functions)
        except (SyntaxError, ValueError) as error:  # such as a method without its super()
            yield f"does not compile: {error}"
            return
        yield _fails(self._session, reaches) or ""


def _fails(session: pytest.Session, reaches: Sequence[Reach]) -> str | None:
    """Run tests and seeds until one fails; returns its name."""
    seen = _Reports()
    session.config.pluginmanager.register(seen)
    try:
        items = [each.test for each in reaches if not isinstance(each.test, int)]
        for item, following in zip(items, [*items[1:], None], strict=False):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if seen.failed is not None:
                return seen.failed
        for each in reaches:
            if isinstance(each.test, int) and run(each.test) is not None:
                return each.name
    finally:
        session.config.pluginmanager.unregister(seen)
    return None


class _Reports:
    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class _Terminal:
    """Instead of the reporter, for who writes to the terminal."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


def _tracer(files: dict[str, str], lines: dict[str, set[int]]) -> Any:
    left: dict[CodeType, set[int]] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        module = files.get(code.co_filename)
        if module is None:
            return None
        if code not in left:
            left[code] = {line for *_, line in code.co_lines() if line is not None}
        if not (unseen := left[code]):  # to trace what has run costs much
            return None
        seen = lines[module]

        def line(frame: FrameType, event: str, _: object) -> Any:
            seen.add(frame.f_lineno)
            unseen.discard(frame.f_lineno)
            return line

        return line

    return trace


# -- forks -------------------------------------------------------------------------------------


@dataclass
class _Fork:
    pid: int
    output: int
    _spent: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def stands_still(self) -> bool:
        """Whether it has used no CPU for long."""
        parts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        spent = float(parts[11]) + float(parts[12])
        now = time.monotonic()
        if spent != self._spent:
            self._spent, self._since = spent, now
        return now - self._since > LONGEST_WAIT

    def end(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        with suppress(OSError):
            os.close(self.output)


def _forked(work: Any, cpu: int | None = None) -> _Fork:
    """Run *work*, which yields what the parent reads as lines of JSON, in a process of its own; end
    it after so many seconds of *cpu*.
    """
    output, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with suppress(OSError):
            os.setpgid(pid, pid)
        return _Fork(pid, output)
    try:
        os.setpgid(0, 0)
        os.close(output)
        if cpu is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        for each in work():
            os.write(writing, json.dumps(each).encode() + b"\n")
    except BaseException:  # noqa: BLE001 - it must not go on as the parent
        traceback.print_exc()
    finally:
        os._exit(0)
    raise AssertionError  # never reached


def _lines_of(fork: _Fork) -> Iterator[Any]:
    with os.fdopen(os.dup(fork.output)) as lines:
        for line in lines:
            yield json.loads(line)
            if not line.endswith("\n"):
                break
    fork.end()
