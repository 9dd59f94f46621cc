"""A lease store of another distribution is found by the scheme of ``leases_url``."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_leases import LeaseClient, LeasedTask
from celery_leases.errors import LeaseConfigurationError, LeaseHeld
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.worker import processes
from celery_leases.worker.checks import startup

DISTRIBUTIONS = Path(__file__).parents[1] / "distributions"
SECRET = "s3cret"

Install = Callable[..., None]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DISTRIBUTIONS))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Install a distribution that names *value* for ``own://``, and has a module ``name``."""

    def installed(value: str, name: str = "own_leases", source: str = "") -> None:
        place = tmp_path / name
        info = place / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[celery_leases.stores]\nown = {value}\n")
        (place / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return installed


class AWorker:
    """What is looked at of a worker that starts."""

    pool_cls = "solo"
    soft_time_limit = time_limit = None

    def __init__(self, app: Celery) -> None:
        self.app = app


class Plugged:
    """An eager app on real stores: leases at *url*, records in a file."""

    def __init__(self, url: str, directory: Path) -> None:
        self.app = Celery("plugged", broker="memory://", set_as_current=False)
        self.app.conf.update(
            task_always_eager=True,
            leases_eager_stores=True,
            leases_url=url,
            leases_prefix=directory.name,
            leases_database_url=f"sqlite:///{directory}/records.db",
        )
        self.seen: list[Any] = []

        @self.app.task(base=LeasedTask, bind=True, name="plugged.work", lease_key="k", shared=False)
        def work(task: Any) -> str:
            process = processes.process_of(self.app, eager=True)
            leases, (record,) = process.leases, process.records.search()
            held = leases.holder(record.stored_key)
            ours = held is not None and held.token == task.lease.token
            self.seen.append((leases, ours, task.apply().result))
            return "done"

        self.app.finalize()
        self.work = self.app.tasks["plugged.work"]


@pytest.fixture
def plugged(tmp_path: Path) -> Iterator[Callable[[str], Plugged]]:
    """Makes apps whose stores are forgotten after the test."""
    yield lambda url: Plugged(url, tmp_path)
    processes.close_all()


def test_tasks_run_under_the_leases_of_another_distribution(toy, plugged) -> None:
    shop = plugged("toy://shop")
    processes.process_of(shop.app, eager=True).records.check()
    assert shop.work.apply().get() == "done"
    ((leases, ours, nested),) = shop.seen
    assert type(leases).__name__ == "ToyLeaseStore"
    assert ours
    assert isinstance(nested, LeaseHeld)
    (record,) = processes.process_of(shop.app, eager=True).records.search()
    assert leases.holder(record.stored_key) is None
    assert shop.work.apply().get() == "done"
    assert len(shop.seen) == 1


def test_a_worker_starts_with_it_and_logs_its_warning(toy, plugged, caplog) -> None:
    with caplog.at_level(logging.WARNING, "celery_leases"):
        startup.check_before_work(AWorker(plugged("toy://shop").app))
    assert "toy://shop" in caplog.text
    assert "is in the memory of this process" in caplog.text


def test_a_client_finds_it_too(toy: None, tmp_path: Path) -> None:
    with LeaseClient("TOY://shop", f"sqlite:///{tmp_path}/records.db") as client:
        assert client._leases.holder("t:x|y") is None


STORE = """
from celery_leases.stores.interfaces import LeaseStore
class Store(LeaseStore):
    name = {name}
    def acquire(self, call): pass
    renew = release = holder = acquire
def opened(settings): return Store()
"""


@pytest.mark.parametrize(
    ("value", "source", "why"),
    [
        ("own_missing:opened", "", "cannot be loaded (ModuleNotFoundError: "),
        ("own_leases:other", "", "cannot be loaded (AttributeError: "),
        ("own_leases:opened", "raise ValueError('no server')", "cannot be loaded (ValueError: no s"),
        ("own_leases:opened", "opened = 1", "is of type int, which cannot be called"),
        (
            "own_leases:opened",
            "def opened(settings): raise OSError('no way to ' + settings.url)",
            "did not open it (OSError: no way to own://",
        ),
        (
            "own_leases:opened",
            "def opened(settings): return object()",
            "returned an object of type object which is not a LeaseStore",
        ),
        (
            "own_leases:opened",
            STORE.format(name="'x' * 256"),
            "returned an object of type Store whose name is not a text of 1 to 255 characters",
        ),
        (
            "own_leases:opened",
            STORE.format(name="'own'").replace("holder = ", ""),
            "did not open it (TypeError: Can't instantiate abstract class Store with",
        ),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_used_stops_the_worker(install, plugged, value, source, why) -> None:
    install(value, source=source)
    with pytest.raises(SystemExit) as caught:
        startup.check_before_work(AWorker(plugged(f"own://u:{SECRET}@host/1").app))
    said = str(caught.value)
    assert said.startswith("celery_leases: leases_url='own://host/1': ")
    assert f"the entry point own = {value} of own_leases {why}" in said
    assert SECRET not in said


def test_the_error_of_a_store_about_its_configuration_is_shown_as_it_is(install, plugged) -> None:
    error = "from celery_leases.errors import LeaseConfigurationError as Wrong\n"
    install("own_leases:opened", source=error + "def opened(_): raise Wrong('name a bucket')")
    with pytest.raises(SystemExit, match=r"^celery_leases: name a bucket$"):
        startup.check_before_work(AWorker(plugged("own://host").app))


@pytest.mark.parametrize("url", ["etcd://host", "host:6379", "://host"])
def test_an_unknown_scheme_names_those_that_are_installed(toy: None, url: str) -> None:
    with pytest.raises(LeaseConfigurationError, match=re.escape("(installed: toy://)")) as caught:
        LeaseClient(url, "sqlite://")
    assert '"celery_leases.stores"' in str(caught.value)


def test_a_scheme_of_two_distributions_is_refused(install: Install) -> None:
    """Which one is used would be random."""
    install("own_leases:opened")
    install("others:opened", "own_others")
    both = (
        "claimed by the entry point own = others:opened of own_others and "
        "the entry point own = own_leases:opened of own_leases: uninstall all but one"
    )
    with pytest.raises(LeaseConfigurationError, match=re.escape(both)):
        LeaseClient("own://host", "sqlite://")


def test_no_distribution_takes_the_place_of_redis(install: Install, tmp_path: Path) -> None:
    install("own_leases:opened")
    entry_points = tmp_path / "own_leases" / "own_leases-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[celery_leases.stores]\nredis = own_leases:opened\n")
    with LeaseClient("redis://127.0.0.1:1/0", "sqlite://") as client:
        assert isinstance(client._leases, RedisLeaseStore)
