"""What celery-once and celery-singleton do when a call is published, with the options that their
pages name: docs/how-to/from-celery-once.md and docs/how-to/from-celery-singleton.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_leases import testing
from celery_leases.errors import AlreadyQueued, KeyReused
from celery_leases.testing.kit import LeaseKit
from tests.unit.doc_pages import blocks, executed, page

ONCE, SINGLETON = "from-celery-once", "from-celery-singleton"


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    source, *_ = blocks(page(request.param), "python")
    with executed(source, "shop") as names:
        yield names


@pytest.fixture
def kit(shop: dict[str, Any]) -> Iterator[LeaseKit]:
    """Its calls are stored, and nothing is sent."""
    with testing.leases(shop["app"], eager=False) as kit:
        yield kit


once = pytest.mark.parametrize("shop", [ONCE], indirect=True)
singleton = pytest.mark.parametrize("shop", [SINGLETON], indirect=True)
both = pytest.mark.parametrize("shop", [ONCE, SINGLETON], indirect=True)


@once
def test_once_a_second_delay_raises_already_queued(shop: dict[str, Any], kit: LeaseKit) -> None:
    first = shop["report"].delay("north")
    with pytest.raises(AlreadyQueued) as told:
        shop["report"].apply_async(("north",), {"month": "may"})
    assert (told.value.call_id, told.value.state) == (first.id, "pending")
    assert shop["ask_for_report"]("north") == first.id
    assert shop["ask_for_report"]("south") != first.id
    assert len(kit.published) == 2


@once
def test_once_a_running_task_holds_its_lock(shop: dict[str, Any], kit: LeaseKit) -> None:
    with kit.hold(shop["report"], "north"):
        kit.tick("2h")
        with pytest.raises(AlreadyQueued, match="is running"):
            shop["report"].delay("north")
    assert shop["report"].delay("north").id


def test_once_graceful_publishes_nothing_and_raises_nothing() -> None:
    source = blocks(page(ONCE), "python")[0].replace('"raise",', '"wait",')
    with executed(source, "graceful") as names, testing.leases(names["app"], eager=False) as kit:
        first = names["report"].delay("north")
        assert names["report"].delay("north").id == first.id
        assert len(kit.published) == 1


def test_once_all_arguments_make_the_key_where_it_names_them() -> None:
    source = blocks(page(ONCE), "python")[0].replace("report:{shop}", "report:{shop}:{month}")
    with executed(source, "all") as names, testing.leases(names["app"], eager=False):
        names["report"].delay("north")
        names["report"].delay("north", month="may")
        with pytest.raises(AlreadyQueued):
            names["report"].delay(shop="north", month="all")


@singleton
def test_singleton_a_duplicate_gets_the_result_of_the_first(shop, kit) -> None:
    first = shop["ask_for_report"]("north")
    assert shop["ask_for_report"]("north") == first
    assert shop["report"].apply_async(("north",), {"month": "may"}).id == first
    assert shop["ask_for_report"]("south") != first
    assert len(kit.published) == 2
    with kit.hold(shop["report"], "east"):
        assert shop["ask_for_report"]("east").startswith("held-")
    assert len(kit.published) == 2


def test_singleton_raises_on_a_duplicate_by_a_setting() -> None:
    source = blocks(page(SINGLETON), "python")[0]
    source = source.replace("\n\n\n@app", '\napp.conf.leases_on_busy = "raise"\n\n\n@app', 1)
    with executed(source, "raising") as names, testing.leases(names["app"], eager=False):
        first = names["report"].delay("north")
        with pytest.raises(AlreadyQueued) as told:
            names["report"].delay("north")
        assert told.value.call_id == first.id


@both
def test_the_lock_is_free_once_the_task_has_ended(shop: dict[str, Any], kit: LeaseKit) -> None:
    first = shop["report"].delay("north")
    assert kit.run_queued()[0].get() == {"shop": "north"}
    second = shop["report"].delay("north")
    assert second.id != first.id
    assert kit.run_queued()[0].get() == {"shop": "north"}
    assert kit.status(shop["report"], "north").call_id == second.id


@pytest.mark.parametrize("name", [ONCE, SINGLETON])
def test_without_rerun_a_done_key_stays_done_and_its_arguments_are_compared(name: str) -> None:
    source = blocks(page(name), "python")[0]
    source = source.replace('lease_runs="each"', "").replace('lease_on_busy="raise"', "")
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(",")]
    source = "\n".join(lines)
    with executed(source, "done") as names, testing.leases(names["app"], eager=False) as kit:
        first = names["report"].delay("north")
        kit.run_queued()
        assert names["report"].delay("north").id == first.id
        assert kit.run_queued() == []
        with pytest.raises(KeyReused):
            names["report"].delay("north", month="may")
