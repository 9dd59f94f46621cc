"""Runs one case with one package, in its own process and with two private Redis servers."""

import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.peers.observations import Case, Observed
from tests.support.process import GuardedProcess
from tests.support.servers import RedisServer

LIMIT = 180.0
"""No case takes longer than this, in seconds."""


class NotPlayed(RuntimeError):
    """A case ended without an observation; the message ends with the output of its process."""


def play(case: Case, package: str, python: Path) -> Observed:
    """The observation; raises NotPlayed."""
    with (
        tempfile.TemporaryDirectory(prefix="peers-") as place,
        RedisServer() as broker,
        RedisServer() as locks,
    ):
        directory = Path(place)
        chosen = {"PEERS_LOCK_SECONDS": case.locks, "PEERS_VISIBILITY": case.visibility}
        env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("CELERY", "PEERS"))
            },
            **{name: f"{value:g}" for name, value in chosen.items() if value is not None},
            "PEERS_PACKAGE": package,
            "PEERS_BROKER": broker.url,
            "PEERS_LOCKS": locks.url,
            "PEERS_DIRECTORY": place,
            "C_FORCE_ROOT": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": place,
        }
        argv: list[str | Path] = [python, "-m", "benchmarks.peers.play", case.row]
        process = GuardedProcess(argv, log=directory / "play.log", env=env, cwd=ROOT)
        try:
            _attend(process, locks, directory / "locks-away")
        finally:
            process.end()
        return _observed(process, directory)


def _attend(process: GuardedProcess, locks: RedisServer, away: Path) -> None:
    """Wait for the end of the case; stop and start the lock store when the case wants it."""
    deadline = time.monotonic() + LIMIT
    while process.alive and time.monotonic() < deadline:
        if away.exists() and locks.alive:
            locks.kill()
        elif not away.exists() and not locks.alive:
            locks.start()
        time.sleep(0.05)


def _observed(process: GuardedProcess, directory: Path) -> Observed:
    if (found := directory / "observed").exists():
        return Observed(**json.loads(found.read_text()))
    workers = [
        path.read_text(errors="replace")[-2000:] for path in sorted(directory.glob("worker-*.log"))
    ]
    raise NotPlayed("\n".join([process.logs()[-2000:], *workers]))
