"""What goes wrong in a run, at random times by a seed; several things may go wrong at once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.soak.deployment import POOLS, TTL, Deployment

PAUSE = (1.0, 5.0)
"""Seconds between two faults."""


class Faults:
    """Begins faults until it is stopped. ``counts`` is how often each has happened."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.longest_pause = 0.0
        self._deployment = deployment
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._busy: dict[str, threading.Lock] = {}
        self._running: list[threading.Thread] = []
        self._began = time.monotonic()
        self._journal = deployment.stage.directory / "faults"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more, and wait until all is healed."""
        self._stop.set()
        self._thread.join()
        for each in self._running:
            each.join()

    def _run(self) -> None:
        kinds: list[tuple[Callable[..., str | None], int]] = [
            (self._kill_child, 5),
            (self._kill_worker, 2),
            (self._pause_worker, 3),
            (self._pause_child, 3),
            (self._cut_link, 6),
            (self._stall_link, 3),
            (self._refuse_link, 3),
            (self._kill_server, 2),
            (self._pause_server, 2),
        ]
        names, weights = zip(*kinds, strict=True)
        while not self._stop.wait(self._random.uniform(*PAUSE)):
            (kind,) = self._random.choices(names, weights)
            given = random.Random(self._random.random())
            thread = threading.Thread(target=self._one, args=(kind, given), daemon=True)
            thread.start()
            self._running = [each for each in self._running if each.is_alive()] + [thread]

    def _one(self, kind: Callable[[random.Random], str | None], given: random.Random) -> None:
        began = time.monotonic()
        what = kind(given)
        if what is None:
            return
        self.counts[what.partition(":")[0]] += 1
        line = {"at": began, "until": time.monotonic(), "what": what}
        with self._journal.open("a") as journal:
            journal.write(json.dumps(line) + "\n")

    @contextmanager
    def _alone(self, target: str) -> Iterator[bool]:
        """Whether no other fault is at work on a target."""
        lock = self._busy.setdefault(target, threading.Lock())
        got = lock.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                lock.release()

    # -- processes -------------------------------------------------------------------------------

    def _kill_child(self, given: random.Random) -> str | None:
        with self._alone("prefork") as alone:
            children = self._deployment.workers["prefork"].children() if alone else []
            if not children:
                return None
            with suppress(ProcessLookupError):
                os.kill(given.choice(children), signal.SIGKILL)
        return "a child killed"

    def _kill_worker(self, given: random.Random) -> str | None:
        pool = given.choice(list(POOLS))
        with self._alone(pool) as alone:
            if not alone:
                return None
            worker = self._deployment.workers[pool]
            worker.kill()
            worker.wait(30)
            time.sleep(given.uniform(0, TTL))
            for _ in range(3):  # a server may be dead at the moment
                with suppress(Exception):
                    worker.start(60)
                    break
        return f"a worker killed: {pool}"

    def _pause_worker(self, given: random.Random) -> str | None:
        pool = given.choice(list(POOLS))
        with self._alone(pool) as alone:
            if not alone:
                return None
            worker, seconds = self._deployment.workers[pool], given.uniform(0.2, 2.0) * TTL
            worker.pause()
            self._wait(seconds)
            worker.resume()
        return f"a worker paused: {pool}, {seconds:.1f} s"

    def _pause_child(self, given: random.Random) -> str | None:
        with self._alone("prefork") as alone:
            worker = self._deployment.workers["prefork"]
            children = worker.children() if alone else []
            if not children:
                return None
            child, seconds = given.choice(children), given.uniform(0.2, 2.0) * TTL
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
                self._wait(seconds)
                os.kill(child, signal.SIGCONT)
        return f"a child paused: {seconds:.1f} s"

    def _wait(self, seconds: float) -> None:
        self.longest_pause = max(self.longest_pause, seconds)
        time.sleep(seconds)

    # -- connections -----------------------------------------------------------------------------

    def _cut_link(self, given: random.Random) -> str | None:
        (pool, server), link = given.choice(list(self._deployment.links.items()))
        return f"connections cut: {pool} to {server}, {link.cut()}"

    def _stall_link(self, given: random.Random) -> str | None:
        (pool, server), link = given.choice(list(self._deployment.links.items()))
        with self._alone(f"link {link.port}") as alone:
            if not alone:
                return None
            seconds = given.uniform(0.2, 2.0) * TTL
            link.stall()
            time.sleep(seconds)
            link.heal()
        return f"no data: {pool} to {server}, {seconds:.1f} s"

    def _refuse_link(self, given: random.Random) -> str | None:
        (pool, server), link = given.choice(list(self._deployment.links.items()))
        with self._alone(f"link {link.port}") as alone:
            if not alone:
                return None
            seconds = given.uniform(0.2, 2.0) * TTL
            link.refusing = True
            link.cut()
            time.sleep(seconds)
            link.heal()
        return f"no connection: {pool} to {server}, {seconds:.1f} s"

    # -- servers ---------------------------------------------------------------------------------

    def _kill_server(self, given: random.Random) -> str | None:
        (name,) = given.choices(["redis", "postgres", "rabbit"], [4, 2, 1])
        with self._alone(f"server {name}") as alone:
            if not alone:
                return None
            server = self._deployment.servers[name]
            server.kill()
            time.sleep(given.choice([0.0, 0.5, 1.5]) * TTL)
            server.start()
        return f"{name} killed"

    def _pause_server(self, given: random.Random) -> str | None:
        name = given.choice(["redis", "postgres", "rabbit"])
        with self._alone(f"server {name}") as alone:
            if not alone:
                return None
            server, seconds = self._deployment.servers[name], given.uniform(0.2, 1.5) * TTL
            server.pause()
            time.sleep(seconds)
            server.resume()
        return f"{name} paused: {seconds:.1f} s"
