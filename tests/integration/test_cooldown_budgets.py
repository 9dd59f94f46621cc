"""What failures, cooldowns and groups cost: trips and statements of a warmed-up worker, counted at
the servers.
"""

from collections.abc import Iterator

import pytest

from tests.integration.conftest import BenchFactory
from tests.integration.cooldowns import BROKEN, BUSY, COOLING, OK, refusal
from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    REDIS_REDIS_POSTGRES,
    got,
    spelled,
    until,
)
from tests.integration.query_logs import Bench

pytestmark = pytest.mark.both_lease_stores  # their costs differ


@pytest.fixture(
    scope="module", params=[REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES], ids=spelled
)
def bench(request: pytest.FixtureRequest, bench_factory: BenchFactory) -> Iterator[Bench]:
    """A worker that has run, failed, refused, and closed a group before."""
    made = bench_factory(request.param, home=COOLING)
    tasks = made.stage.tasks
    for n in range(8):
        got(tasks.slow.delay(f"warm-{n}", [OK]))
        got(tasks.gated.delay(f"warm-{n}", [OK], "warm"))
        _fails(made, "slow", f"warm-failed-{n}", [BROKEN])
        refusal(tasks.slow.delay(f"warm-failed-{n}", [BROKEN]))
        _fails(made, "gated", f"warm-failed-{n}", [BUSY], f"warm-{n}")
        refusal(tasks.gated.delay(f"warm-failed-{n}", [BUSY], f"warm-{n}"))
    yield made
    made.close()


def _fails(bench: Bench, task: str, *arguments: object) -> None:
    call = getattr(bench.stage.tasks, task).delay(*arguments)
    assert isinstance(got(call, propagate=False), Exception)
    # What happens after the caller has its answer belongs to the call too.
    until(lambda: bool(bench.stage.log(f"{call.id}] raised")), "the end of the call")


def test_an_open_group_costs_no_more_than_no_group(bench: Bench, name: str) -> None:
    tasks = bench.stage.tasks
    alone = bench.cost(lambda: got(tasks.slow.delay(name, [OK])))
    grouped = bench.cost(lambda: got(tasks.gated.delay(name, [OK], f"group-{name}")))
    assert (
        grouped[0]
        == alone[0]
        == ([] if bench.stage.lease_store == "database" else ["EVALSHA", "EVALSHA"])
    )
    assert len(grouped[1]) == len(alone[1]) == 2


def test_a_failure_that_cools_its_key_costs_what_a_success_costs(bench: Bench, name: str) -> None:
    commands, statements = bench.cost(lambda: _fails(bench, "slow", name, [BROKEN]))
    if bench.stage.lease_store == "database":
        assert (commands, len(statements)) == ([], 2)
    else:
        assert (commands, len(statements)) == (["EVALSHA", "EVALSHA"], 2)


def test_a_press_during_a_cooldown_is_refused_by_one_statement(bench: Bench, name: str) -> None:
    _fails(bench, "slow", name, [BROKEN])
    before = bench.version(f"slow:{name}")
    commands, statements = bench.cost(lambda: refusal(bench.stage.tasks.slow.delay(name, [BROKEN])))
    assert commands == ([] if bench.stage.lease_store == "database" else ["EVALSHA"])
    assert len(statements) == 1
    assert bench.version(f"slow:{name}") == before


def test_closing_a_group_costs_one_look_and_one_write_more(bench: Bench, name: str) -> None:
    group = f"group-{name}"
    commands, statements = bench.cost(lambda: _fails(bench, "gated", name, [BUSY], group))
    if bench.stage.lease_store == "database":
        assert not commands
        assert len(statements) == 4
    else:
        assert commands == ["EVALSHA"] * 4
        assert len(statements) == 2


def test_a_call_at_a_closed_group_is_refused_by_one_statement(bench: Bench, name: str) -> None:
    group, tasks = f"group-{name}", bench.stage.tasks
    value = got(tasks.gated.delay(f"{name}-done", [OK], group))
    before = bench.version(f"gated:{name}-done")
    bench.stage.client.close_group(group, 60)
    commands, statements = bench.cost(lambda: refusal(tasks.gated.delay(name, [OK], group)))
    assert len(commands) <= (0 if bench.stage.lease_store == "database" else 1)
    assert len(statements) == 1
    assert bench.stage.find_row("gated", f"gated:{name}") is None

    again = bench.cost(lambda: got(tasks.gated.delay(f"{name}-done", [OK], group)) == value)
    assert (len(again[0]), len(again[1])) == (len(commands), len(statements))
    assert bench.version(f"gated:{name}-done") == before
