"""Publishes calls of many keys, several for each, until it is stopped."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from tests.soak.deployment import Deployment

KEYS = 200
"""Keys of one round. The next round begins when all calls of this one are published."""
WAYS = ("ok", "effect", "complete", "retry", "cooldown")
CALLS = 3
"""Messages for each key, on average one of them a second copy of the same call."""


@dataclass(frozen=True)
class Key:
    """A key of ``tests.apps.proofs``."""

    task: str
    name: str
    way: str


class Load:
    """``published`` are the keys of which the broker has confirmed a call; ``refused`` counts the
    errors that a caller got.
    """

    def __init__(self, deployment: Deployment, seed: int, per_second: float) -> None:
        self.published: Counter[Key] = Counter()
        self.refused: Counter[str] = Counter()
        self._deployment = deployment
        self._random = random.Random(seed)
        self._pause = 1.0 / per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Publish nothing more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            for key in self._round(number):
                if self._stop.wait(self._pause):
                    return
                self._publish(key)

    def _round(self, number: int) -> list[Key]:
        keys = [Key("play", f"{number}-{each}", WAYS[each % len(WAYS)]) for each in range(KEYS)]
        calls = keys * CALLS
        self._random.shuffle(calls)
        return calls

    def _publish(self, key: Key) -> None:
        task = getattr(self._deployment.stage.tasks, key.task)
        seconds = self._random.choice([0.0, 0.1, 0.5, 2.0])
        given = ((key.name, key.way), {"seconds": seconds})
        again = {"retry_policy": {"max_retries": 0}}
        try:
            sent = task.apply_async(*given, **again)
            self.published[key] += 1
            if self._random.random() < 1 / CALLS:
                task.apply_async(*given, task_id=sent.id, **again)
        except Exception as error:  # noqa: BLE001 - the broker is away, as the caller knows
            self.refused[type(error).__name__] += 1
            time.sleep(0.5)
