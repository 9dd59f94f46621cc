"""Which tests ``make test`` runs of those that are written for many combinations, and which ``make
test-all``.
"""

from collections import Counter
from importlib import import_module
from pkgutil import iter_modules

import pytest

from celery_leases.testing import contracts
from tests.combinations import PARTS, Place, chosen
from tests.processes import grouped

MODULE = """
import pytest

SIX = [
    ("redis", "redis", "postgres"),
    ("rabbit", "database", "postgres"),
    ("redis", "database", "mariadb"),
    ("rabbit", "redis", "mariadb"),
    ("redis", "database", "sqlite"),
    ("rabbit", "redis", "sqlite"),
]
ANYWHERE = pytest.mark.parametrize("combination", SIX)

@pytest.fixture(scope="module", params=SIX)
def stage(request):
    return request.param

def test_alone():
    pass

@ANYWHERE
def test_one(combination):
    pass

@ANYWHERE
@pytest.mark.parametrize("way", ["up", "down", "left", "right"])
def test_ways(combination, way):
    pass

def test_by_fixture(stage):
    pass

@ANYWHERE
@pytest.mark.both_lease_stores
def test_both(combination):
    pass

@ANYWHERE
@pytest.mark.only(database=("postgres", "mariadb"), leases="database")
@pytest.mark.parametrize("way", ["up", "down", "left"])
def test_somewhere(combination, way):
    pass
"""


def by_test(items: list[pytest.Item]) -> dict[str, list[dict[str, str]]]:
    """The parts of the places where each test runs, by its name without the combination."""
    found: dict[str, list[dict[str, str]]] = {}
    for item in items:
        place = Place.of(item)
        if place is not None:
            found.setdefault(str(place.test), []).append(dict(place.parts))
    return found


@pytest.fixture
def items(pytester: pytest.Pytester) -> list[pytest.Item]:
    """All tests of the module above."""
    pytester.makeini("[pytest]\nmarkers =\n  both_lease_stores\n  only")
    return pytester.getitems(MODULE)


def test_each_test_runs_once_and_each_part_is_used(items: list[pytest.Item]) -> None:
    found = by_test(chosen(items, everywhere=False))
    assert set(found) == set(by_test(items))
    for test, places in found.items():
        both = "::test_both" in test
        assert len(places) == (2 if both else 1)
        assert not both or {place["leases"] for place in places} == {"redis", "database"}
    used = Counter(part for places in found.values() for place in places for part in place.items())
    assert set(used) == {(name, part) for name, parts in PARTS.items() for part in parts}


def test_the_tests_of_a_module_share_its_combinations_evenly(items: list[pytest.Item]) -> None:
    free = [
        item for item in items if "test_somewhere" not in item.name and "test_both" not in item.name
    ]
    used = Counter(
        str(sorted(place.items())) for (place,) in by_test(chosen(free, everywhere=False)).values()
    )
    assert set(used.values()) == {1}
    assert len(used) == 6


def test_a_part_that_no_test_would_use_costs_one_test_more(items: list[pytest.Item]) -> None:
    one = [item for item in items if "test_one" in item.name]
    (places,) = by_test(chosen(one, everywhere=False)).values()
    used = {part for place in places for part in place.items()}
    assert used == {(name, part) for name, parts in PARTS.items() for part in parts}
    assert len(places) == 4


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_mark_leaves_out_where_a_test_makes_no_sense(items, everywhere) -> None:
    found = by_test(chosen(items, everywhere=everywhere))
    places = [
        place for test, places in found.items() if "::test_somewhere" in test for place in places
    ]
    assert {(place["leases"], place["database"]) for place in places} == {
        ("database", "postgres"),
        ("database", "mariadb"),
    }
    assert len(places) == (6 if everywhere else 3)


MANY = """
import pytest

@pytest.mark.parametrize("step", range(9))
def test_steps(step):
    pass

@pytest.mark.parametrize("step", range(9))
def test_more(step):
    pass

@pytest.mark.every_argument
@pytest.mark.parametrize("step", range(9))
def test_each(step):
    pass

@pytest.mark.nightly
def test_at_night():
    pass

@pytest.mark.nightly
@pytest.mark.parametrize("step", range(9))
def test_steps_at_night(step):
    pass
"""


def test_tests_with_workers_take_turns_in_their_arguments(pytester: pytest.Pytester) -> None:
    crash = pytester.mkdir("crash")
    (crash / "test_many.py").write_text(MANY)
    items = pytester.getitems(MANY) + list(
        pytester.genitems([pytester.getpathnode(crash / "test_many.py")])
    )
    names = Counter(item.nodeid.partition("[")[0] for item in chosen(items, everywhere=False))
    assert sorted(names.values()) == [1, 1, 9, 9, 9, 9]
    steps = [
        item.name
        for item in chosen(items, everywhere=False)
        if "crash" in item.nodeid and "each" not in item.name
    ]
    assert steps == ["test_steps[0]", "test_more[1]"]
    assert len(chosen(items, everywhere=True)) == 74


def test_tests_that_share_a_worker_are_in_one_group(items, pytester):
    crash = pytester.mkdir("crash")
    (crash / "test_slow.py").write_text(MODULE)
    slow = list(pytester.genitems([pytester.getpathnode(crash / "test_slow.py")]))
    everything = [*items[:9], *slow, *items[9:]]
    with_workers, others = grouped(everything)
    assert [[everything[number] for number in group] for group in others] == [items]
    assert {everything[number] for group in with_workers for number in group} == {*slow}
    for group in with_workers:
        places = [Place.of(everything[number]) for number in group]
        assert len({place and place.parts for place in places}) == 1
    assert len(with_workers) == 7  # six combinations, and the test that has none
    assert len(with_workers[-1]) == 1


@pytest.mark.parametrize("suite", [module.name for module in iter_modules(contracts.__path__)])
def test_the_assertions_of_a_suite_are_rewritten(suite: str) -> None:
    """Otherwise a failure shows neither side of a comparison."""
    module = import_module(f"{contracts.__name__}.{suite}")
    assert "@pytest_ar" in vars(module)
