"""On which combinations of broker, lease store and database a test runs.

A test that is parametrized by a combination, or by one server of a store, describes what holds on
each of them. ``make test`` runs it on one, and the tests of a module take turns. ``make test-all``
(pytest's option ``--all-combinations``) runs every test on all of them. A test that starts workers
runs with one set of its other arguments too, in turns. Marks change the choice:

* ``@pytest.mark.both_lease_stores``: one combination with leases in Redis and one with leases in
  the database.
* ``@pytest.mark.every_argument``: all sets of arguments.
* ``@pytest.mark.nightly``: ``make test-all`` only.
* ``@pytest.mark.only(database=("postgres", "mariadb"), leases="database")``: the test makes sense
  there only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

PARTS = {
    "broker": ("redis", "rabbit"),
    "leases": ("redis", "database"),
    "database": ("postgres", "mariadb", "sqlite"),
}
"""What a combination is made of, in its order."""

SERVERS = {"database_url", "one_database", "open_store", "server_url", "store_elsewhere"}
"""The fixtures and arguments that stand for one server of a store."""

SAMPLED = ("crash", "integration")
"""Directories whose tests start workers: each set of arguments costs seconds."""

Part = tuple[str, str]


@dataclass(frozen=True)
class Place:
    """One test on one combination."""

    item: pytest.Item
    #: The test and its other arguments: what is the same on all combinations.
    test: tuple[Any, ...]
    #: What it uses: ``("broker", "rabbit")`` and so on.
    parts: frozenset[Part]

    @classmethod
    def of(cls, item: pytest.Item) -> Place | None:
        """Where a test runs; ``None`` for one that has no such choice."""
        callspec = getattr(item, "callspec", None)
        params: dict[str, object] = callspec.params if callspec is not None else {}
        for name, value in params.items():
            parts = _parts(name, value)
            if parts is not None:
                others = tuple(
                    (each, repr(other)) for each, other in params.items() if each != name
                )
                return cls(item, (item.nodeid.partition("[")[0], others), frozenset(parts.items()))
        return None

    def makes_sense(self) -> bool:
        """Whether no ``only`` mark rules it out."""
        parts = dict(self.parts)
        for mark in self.item.iter_markers("only"):
            for name, wanted in mark.kwargs.items():
                if parts.get(name) not in ((wanted,) if isinstance(wanted, str) else wanted):
                    return False
        return True


def _parts(name: str, value: object) -> dict[str, str] | None:
    if name in SERVERS:
        return {"server": str(value)}
    if isinstance(value, tuple) and len(value) == len(PARTS):
        parts = dict(zip(PARTS, value, strict=True))
        return parts if all(parts[part] in PARTS[part] for part in PARTS) else None
    return None


def chosen(items: Sequence[pytest.Item], *, everywhere: bool) -> list[pytest.Item]:
    """The tests to run, in their order; *everywhere*: on all combinations that make sense."""
    kept: set[pytest.Item] = set()
    for _, module in groupby(items, key=lambda item: item.path):
        places = []
        for item in module:
            place = Place.of(item)
            if place is None:
                kept.add(item)
            elif place.makes_sense():
                places.append(place)
        kept.update(place.item for place in (places if everywhere else _taking_turns(places)))
    found = [item for item in items if item in kept]
    return found if everywhere else _sampled(found)


def _sampled(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Without what is left to ``make test-all``: the tests of each module with workers take turns
    in which set of arguments they run with.
    """
    left_out: set[pytest.Item] = {
        item for item in items if item.get_closest_marker("nightly") is not None
    }
    of_test: dict[str, list[pytest.Item]] = {}
    turns: Counter[Path] = Counter()
    for item in items:
        if item.path.parent.name in SAMPLED and item not in left_out:
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in of_test.values():
        first = same[0]
        if first.get_closest_marker("every_argument") is not None:
            continue
        turn = turns[first.path]
        turns[first.path] += 1
        kept = {same[turn % len(same)]}
        if first.get_closest_marker("both_lease_stores") is not None:
            kept = {same[0], same[-1]}
        left_out.update(item for item in same if item not in kept)
    return [item for item in items if item not in left_out]


def _taking_turns(places: Iterable[Place]) -> Iterator[Place]:
    """For each test the place whose combination, and then whose parts, were used least by the tests
    before it.

    Then one more test for each part that no test has used.
    """
    used: Counter[Part | frozenset[Part]] = Counter()
    by_test: dict[tuple[Any, ...], list[Place]] = {}
    for place in places:
        by_test.setdefault(place.test, []).append(place)

    def use(place: Place) -> Place:
        used.update({*place.parts, place.parts})
        return place

    def uses(place: Place) -> tuple[int, int]:
        return used[place.parts], sum(used[part] for part in place.parts)

    def adds(place: Place) -> int:
        return sum(not used[part] for part in place.parts)

    picked = [use(min(some, key=uses)) for same in by_test.values() for some in _one_of_each(same)]
    while picked:
        yield from picked
        most = max((place for same in by_test.values() for place in same), key=adds)
        picked = [use(most)] if adds(most) else []


def _one_of_each(same: list[Place]) -> list[list[Place]]:
    """The lists of places of which a test needs one each."""
    if not same[0].item.get_closest_marker("both_lease_stores"):
        return [same]
    in_database = [place for place in same if ("leases", "database") in place.parts]
    return [
        some
        for some in (in_database, [place for place in same if place not in in_database])
        if some
    ]
