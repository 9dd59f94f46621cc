"""What pool processes inherit from the main process of a prefork worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.contract.sql_stores import new_database
from tests.support.servers import RedisServer


@pytest.mark.parametrize(("kind", "leases"), [("postgresql", "redis"), ("mariadb", "database")])
def test_children_share_what_is_prepared_and_nothing_else(
    request: pytest.FixtureRequest, leases_redis: RedisServer, kind: str, leases: str
) -> None:
    env = os.environ | {
        "LEASES_DATABASE_URL": new_database(request, kind),
        "LEASES_URL": leases_redis.url if leases == "redis" else leases,
    }
    command = [sys.executable, "-m", "tests.apps.forked_children"]
    ended = subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
    said: dict[str, Any] = json.loads(ended.stdout)
    assert said["steps"] == dict.fromkeys(said["steps"], True)
    for child in said["children"]:
        assert child == {
            "sockets": 0,
            "threads": 1,
            "frozen": True,
            "shares trips": False,
            "own host": True,
            "random": child["random"],
            "imported": [],
        }
    assert len({child["random"] for child in said["children"]}) == 2
    assert said["prefix"] == "another"
    assert said["unloaded"] == []
    assert said["main"]
