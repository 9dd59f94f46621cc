"""``make demo`` keeps its promises, finds out when one is broken, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from celery_leases.testing.guard import descendants
from celery_leases.testing.process import GuardedProcess, wait_until

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "example_project.demo"]


def play(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The demo to its end, with a directory of its own for temporary files."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run([*DEMO, *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=70, check=False)


def test_the_demo_keeps_its_promises_and_leaves_no_file(tmp_path: Path) -> None:
    """Both kills are told, taken over from and within their bounds; exit code 0, in lines of at most 100 columns."""
    done = play(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"SIGKILLs", done.stdout)) == 2
    assert len(re.findall(r"begins \d+, attempt 2", done.stdout)) == 2
    assert "KEPT: 6 invoices, 12 calls" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    assert list(tmp_path.iterdir()) == []


def test_the_demo_finds_broken_promises(tmp_path: Path) -> None:
    """The same story without leases: invoices are mailed twice, and the demo says so and fails."""
    done = play(tmp_path, "--without-leases")
    assert done.returncode == 1
    assert "BROKEN: invoice:1842:2026-04 was mailed 2 times, not once" in done.stdout
    assert "KEPT" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_stopped_leaves_nothing_behind(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """Ctrl-C in the middle: no process, no file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    demo = GuardedProcess(DEMO, log=tmp_path / "demo.log", cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)})
    try:
        demo.wait_for_log(r"begins 1842", 30)
        below = demo.children()
        assert len(below) > 5
        demo.send(sent)
        assert demo.wait(20) == code, demo.logs()
        # The guard adopts what a process leaves behind.
        wait_until(lambda: not set(below) & set(descendants(os.getpid())), 5, "the end of all processes")
        assert list(temporary.iterdir()) == []
    finally:
        demo.end()


def test_the_examples_for_real_workers_pass(pytester: pytest.Pytester) -> None:
    """docs/testing.md shows a crash test and a contract; both are run as they stand there."""
    page = (ROOT / "docs/testing.md").read_text()
    _, crash, contract = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    # Workers run in pytest's root directory, where the project would be.
    (pytester.path / "example_project").symlink_to(ROOT / "example_project")
    plugin = 'pytest_plugins = ["celery_leases.testing.plugin"]\n'
    assert plugin in crash
    pytester.makeconftest(plugin)
    pytester.makeini("[pytest]\npythonpath = .")
    pytester.makepyfile(test_crash=crash.replace(plugin, ""), test_contract=contract)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=100)
    assert result.ret == 0
    assert result.parseoutcomes().keys() == {"passed"}
