"""A counter that only a correct lease protects: read, yield, write."""

from __future__ import annotations

import random
import time
from uuid import uuid4

from celery_leases.deadlines import hard_deadline
from celery_leases.decide.answers import Renewal
from celery_leases.stores.interfaces import LeaseStore
from celery_leases.testing.contracts.calls import acquired, make_call

TURNS = 12
PATIENCE = 90.0


class LeaseFuzz:
    """Threads that take turns at one key. Only the lease protects ``counter``.

    A thread writes only while at least half of its lease is left by its own clock. So on a busy
    machine a turn is skipped, instead of failing the test.
    """

    def __init__(self, store: LeaseStore, key: str, *, ttl: float, short: float) -> None:
        self.store = store
        self.key = key
        self.ttl = ttl
        self.short = short
        self.counter = 0
        self._until = time.monotonic() + PATIENCE

    def take_turns(self, seed: int) -> int:
        """Take ``TURNS`` turns; returns the number of writes. The first failure ends the turns of
        all threads.
        """
        rand = random.Random(seed)
        former: list[str] = []
        try:
            return sum(self._turn(former, rand) for _ in range(TURNS))
        except BaseException:
            self._until = 0.0
            raise

    def _turn(self, former: list[str], rand: random.Random) -> int:
        expires = rand.random() < 0.1
        token, ttl = uuid4().hex, self.short if expires else self.ttl
        written = self._increment(token, self._acquire(token, ttl, rand), ttl, rand)
        if not expires:
            assert self.store.release(self.key, token)
        former.append(token)
        self._act_late(former, rand)
        return written

    def _acquire(self, token: str, ttl: float, rand: random.Random) -> float:
        call = make_call(self.key, token, ttl=ttl)
        while time.monotonic() < self._until:
            sent = time.monotonic()
            if acquired(self.store.acquire(call)):
                return sent
            time.sleep(rand.uniform(0.001, 0.01))
        raise AssertionError(f"another thread failed, or the key was not free for {PATIENCE:g} s")

    def _increment(self, token: str, sent: float, ttl: float, rand: random.Random) -> int:
        seen = self.counter
        time.sleep(rand.uniform(0, 0.003))
        if rand.random() < 0.3:
            self.store.renew([Renewal(self.key, token, ttl)])
        if rand.random() < 0.1:
            assert acquired(self.store.acquire(make_call(self.key, token, ttl=ttl)))
        if time.monotonic() > hard_deadline(sent, ttl) - ttl / 2:
            return 0
        self.counter = seen + 1
        return 1

    def _act_late(self, former: list[str], rand: random.Random) -> None:
        """Renew and release with an expired token, as a process does that was stopped for long."""
        token = rand.choice(former)
        if rand.random() < 0.3:
            self.store.renew([Renewal(self.key, token, self.short)])
        if rand.random() < 0.5:
            self.store.release(self.key, token)
