"""``make demo`` and ``make demo-cooldown`` keep their promises, notice a broken one, and leave
nothing behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from celery_leases.testing.waits import wait_until
from example_project.demo.narrator import Narrator
from tests.support.guard import descendants
from tests.support.process import GuardedProcess

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "example_project.demo"]
COOLDOWN = [sys.executable, "-m", "example_project.demo.cooldown"]


def play(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The directory for the temporary files of a demo that a test starts."""
    made = tmp_path / "temporary"
    made.mkdir()
    return made


def begin(command: list[str], temporary: Path) -> GuardedProcess:
    env = {**os.environ, "TMPDIR": str(temporary)}
    return GuardedProcess(command, log=temporary.parent / "demo.log", cwd=ROOT, env=env)


def test_the_demo_keeps_its_promises_and_leaves_no_file(tmp_path: Path) -> None:
    done = play(tmp_path, *DEMO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"SIGKILLs .*, in the middle of", done.stdout)) == 2
    assert len(re.findall(r"begins \d+, attempt 2", done.stdout)) == 2
    assert re.search(r"KEPT: 6 invoices, 12 calls, 6 mails \(plain Celery: \d\d\)", done.stdout)
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert list(tmp_path.iterdir()) == []


def test_the_timeline_is_sorted_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(done="mailed")
    began = narrator.began
    narrator.say("web-1", "later", at=began + 3)
    narrator.say("web-2", "earlier", at=began + 2)
    narrator.print_held(before=began + 2.5)
    narrator.say("web-1", "between", at=began + 2.7)
    narrator.scene("A headline")
    lines = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line]
    assert lines == ["earlier", "between", "later", "headline"]


@pytest.mark.nightly
def test_the_demo_finds_broken_promises(tmp_path: Path) -> None:
    done = play(tmp_path, *DEMO, "--without-leases")
    assert done.returncode == 1
    assert "BROKEN: invoice:1842:2026-04 was mailed 2 times, not once" in done.stdout
    assert "KEPT" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_demo_of_cooldowns_pays_once_and_leaves_no_file(tmp_path: Path) -> None:
    done = play(tmp_path, *COOLDOWN)
    assert done.returncode == 0, done.stdout + done.stderr
    table = [
        re.split(r"  +", line.strip())
        for line in done.stdout.splitlines()
        if re.match(r"  the \w+  ", line)
    ]
    night = table.pop(
        3
    )  # how often plain Celery asks for the second document depends on when that comes
    assert table == [
        ["the button", "celery_leases", "22", "2", "$0.04", "1 of 1"],
        ["the button", "plain Celery", "22", "22", "$0.44", "1 of 1"],
        ["the night", "celery_leases", "6", "7", "$0.14", "6 of 6"],
        ["the nonsense", "celery_leases", "1", "3", "$0.06", "1 of 1"],
        ["the nonsense", "plain Celery", "1", "3", "$0.06", "1 of 1"],
    ]
    assert (night[:3], night[5]) == (["the night", "plain Celery", "6"], "6 of 6")
    assert int(night[3]) > 7
    assert "got CoolingDown as the answer to 20 of 20 presses" in done.stdout
    assert done.stdout.count("shows its reader: Retry available in 5 minutes") == 2
    assert "KEPT: 10 promises, 12 paid calls where plain Celery paid for " in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_demo_of_cooldowns_finds_a_call_too_many(temporary: Path) -> None:
    demo = begin(COOLDOWN, temporary)
    try:
        demo.wait_for_log("has started", 30)
        port = re.findall(r"port (\d+)", next(temporary.glob("*/demo/model.log")).read_text())[0]
        stray = json.dumps({"document": 1842, "model": "quill"}).encode()
        url = f"http://127.0.0.1:{port}/summaries"
        urlopen(Request(url, stray, {"Authorization": "Bearer leases"}), timeout=10).close()
        assert demo.wait(100) == 1, demo.logs()
        assert "BROKEN: the button: paid calls after 21 presses: 2, not 1" in demo.logs()
        assert "KEPT" not in demo.logs()
        assert list(temporary.iterdir()) == []
    finally:
        demo.end()


def stopped(demo: GuardedProcess, sent: signal.Signals) -> int:
    """Send a signal, and again for each time that Python ignored it; returns the exit code."""
    demo.send(sent)
    ignored, deadline = 0, time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            return demo.wait(0.2)
        if demo.logs().count("Exception ignored in") > ignored:
            ignored += 1
            demo.send(sent)
    return demo.wait(0)


STOPS = [
    pytest.param(DEMO, signal.SIGINT, 130, marks=pytest.mark.nightly),
    pytest.param(DEMO, signal.SIGTERM, 143, marks=pytest.mark.nightly),
    (COOLDOWN, signal.SIGINT, 130),
]
"""The demo runs to its end in ``make test``, and that of the cooldowns is stopped."""


@pytest.mark.parametrize(("command", "sent", "code"), STOPS)
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    temporary: Path, command: list[str], sent: signal.Signals, code: int
) -> None:
    demo = begin(command, temporary)
    try:
        demo.wait_for_log(r"begins 1842", 30)
        below = demo.children()
        assert len(below) > 5
        ended = stopped(demo, sent)
        # A KeyboardInterrupt inside exec() of a text, as in namedtuple(), lets Python end by SIGINT
        # whatever the exit code is. A shell shows 130 for both.
        if ended == -signal.SIGINT == -sent:
            assert "stopped; nothing is left behind" in demo.logs()
        else:
            assert ended == code, demo.logs()
        # The guard adopts what a process leaves behind.
        wait_until(
            lambda: not set(below) & set(descendants(os.getpid())), 5, "the end of all processes"
        )
        assert list(temporary.iterdir()) == []
    finally:
        demo.end()


def test_the_examples_for_real_workers_pass(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs/how-to/testing.md").read_text()
    crash, contract = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # Workers run in pytest's root directory, where the project would be.
    (pytester.path / "example_project").symlink_to(ROOT / "example_project")
    plugin = 'pytest_plugins = ["tests.support.plugin"]\n'
    assert plugin in crash
    pytester.makeconftest(plugin)
    pytester.makeini("[pytest]\npythonpath = .")
    pytester.makepyfile(test_crash=crash.replace(plugin, ""), test_contract=contract)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=100)
    assert result.ret == 0
    assert result.parseoutcomes().keys() == {"passed"}
