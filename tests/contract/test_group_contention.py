"""Many processes take and free slots of one group in a database at the same time."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from celery_leases.decide.answers import Acquired
from celery_leases.groups.slots import Ask
from celery_leases.stores.sql import cooldown_groups
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call

PROCESSES = 16
TURNS = 15
LIMIT = 8
GROUP = "contended"

_shared: dict[str, Any] = {}


@pytest.mark.parametrize("tries", [1, cooldown_groups.CHANGE_TRIES])
def test_no_claim_of_a_contended_group_fails(server_url: str, tries: int) -> None:
    """Each of many processes gets its turns: no claim and no release fails because others change
    the slots meanwhile, and there are never more than the limit. *tries* that lock nothing.
    """
    store = SqlRecordStore(engine_for(server_url))
    store.migrate()
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    running = server.Array("i", 2)
    with ProcessPoolExecutor(PROCESSES, server, _begin, (server_url, running, tries)) as pool:
        turns = [pool.submit(take_turns, TURNS) for _ in range(PROCESSES)]
        assert sum(turn.result() for turn in turns) == PROCESSES * TURNS
    assert running[0] == 0
    assert 1 < running[1] <= LIMIT
    assert DatabaseLeaseStore(store).groups.slots([GROUP])[GROUP][0].held == {}
    store.database.close()


def _begin(url: str, running: Any, tries: int) -> None:
    cooldown_groups.CHANGE_TRIES = tries  # type: ignore[misc]
    _shared.update(url=url, running=running)


def take_turns(number: int) -> int:
    """Take and free a slot *number* times, with the count of running bodies beside the store;
    raises the first error of the store.
    """
    records = SqlRecordStore(engine_for(_shared["url"]))
    records.availability.grace = 0.0
    leases, running = DatabaseLeaseStore(records), _shared["running"]
    for _ in range(number):
        call = make_call(fresh_key(), group=GROUP, ask=Ask(LIMIT))
        while not isinstance(leases.acquire(call), Acquired):
            time.sleep(0.002)
        with running.get_lock():
            running[0] += 1
            running[1] = max(running)
        time.sleep(0.005)
        with running.get_lock():
            running[0] -= 1
        leases.groups.release_slot(GROUP, call.token)
    records.database.close()
    return number
