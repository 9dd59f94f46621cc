"""The URLs of the two stores: which driver they mean, and that no password in them is ever
shown.
"""

import re
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url

from celery_leases import LeaseClient
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.settings import read_settings
from celery_leases.stores.redis.url import without_password
from celery_leases.stores.sql import connections
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.dialects import Dialect
from celery_leases.stores.sql.joining import _wrong_database
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.urls import display_url

SECRET = "s3cret"
LEASE_URLS = [
    f"redsi://:{SECRET}@h/1",
    f"redis://u:{SECRET}@h:port/1",
    f"redis:/:{SECRET}@h/1",
    f"redis://h/x?password={SECRET}",
    f"redis://h/x?password=a@{SECRET}",
    f"redis://u:a?{SECRET}@h/x",
    f"redis://u:{SECRET}#a@h/x",
    f"rediss+sentinel://:{SECRET}@h1;rediss+sentinel://:{SECRET}@h2",
    f"sentinel://:{SECRET},{SECRET}@h1",
    f"sentinel://:{SECRET};{SECRET}@h1:x;sentinel://:{SECRET}@h2",
]
DATABASE_URLS = [
    f"postgresq://u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}@h:port/d",
    f"postgresql+nodriver://u:{SECRET}@h/d?password={SECRET}",
    f"mysql+asyncmy://h/d?password={SECRET}",
    f"mssql+pyodbc:///?odbc_connect=PWD={SECRET}",
    f"u:{SECRET}@h/d",
    f"://u:{SECRET}@h/d",
]


@pytest.mark.parametrize("url", LEASE_URLS)
def test_the_error_for_a_lease_url_hides_its_password(url: str) -> None:
    with pytest.raises(LeaseConfigurationError, match="leases_url=") as caught:
        LeaseClient(url, "sqlite://")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", DATABASE_URLS)
def test_the_error_for_a_database_url_hides_its_password(url: str) -> None:
    with pytest.raises(LeaseConfigurationError, match="leases_database_url=") as caught:
        engine_for(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql+psycopg2", "mysql+pymysql"])
@pytest.mark.parametrize(
    "where", [f"u:{SECRET}@127.0.0.1:1/x?", f"127.0.0.1:1/x?password={SECRET}&"]
)
def test_an_unreachable_database_is_named_without_the_passwords_of_its_url(scheme, where) -> None:
    more = f"sslpassword={SECRET}&" if scheme.startswith("postgresql") else ""
    records = SqlRecordStore(engine_for(f"{scheme}://{where}{more}connect_timeout=2"))
    with pytest.raises(StoreUnavailable, match=re.escape("127.0.0.1:1/x")) as caught:
        records.read("t:x|y")
    assert SECRET not in str(caught.value)


def test_settings_are_printed_without_urls() -> None:
    url = f"redis://:{SECRET}@h/1?password={SECRET}"
    conf: dict[str, Any] = {
        "leases_url": url,
        "leases_database_url": f"postgresql://h/d?sslpassword={SECRET}",
        "leases_transport_options": {"sentinel_kwargs": {"password": SECRET}},
    }
    assert SECRET not in repr(read_settings(conf, url))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://u:p@h:1/2?x=1", "redis://h:1/2"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("redis://h?a=b@c", "redis://…"),
        ("p w://h", "…://h"),
        (7, ""),
    ],
)
def test_what_is_shown_of_a_url(url: object, text: str) -> None:
    assert display_url(url) == text


def test_the_servers_of_a_list_are_shown() -> None:
    assert without_password("sentinel://:p@h1:1;sentinel://:p@h2:2/0") == "sentinel://h1:1,h2:2/0"


@pytest.mark.parametrize(
    ("url", "installed", "driver"),
    [
        ("postgres://h/d", {"psycopg", "psycopg2"}, "postgresql+psycopg"),
        ("postgres://h/d", {"psycopg2"}, "postgresql+psycopg2"),
        ("postgresql://h/d", {"psycopg"}, "postgresql+psycopg"),
        ("postgresql+psycopg2://h/d", {"psycopg", "psycopg2"}, "postgresql+psycopg2"),
        ("mysql://h/d", {"pymysql"}, "mysql+pymysql"),
        ("mariadb://h/d", {"pymysql"}, "mariadb+pymysql"),
    ],
)
def test_a_url_without_a_driver_takes_one_that_is_installed(monkeypatch, url, installed, driver):
    monkeypatch.setattr(Dialect, "has_driver", lambda name: name in installed)
    engine = engine_for(url)
    assert engine.url.drivername == driver
    assert engine.url.host == make_url(url).host


@pytest.mark.parametrize(
    ("url", "write"),
    [
        ("postgres://h/d", "; pip install 'celery-leases[postgresql]'"),
        ("mysql://h/d", "; pip install 'celery-leases[mysql]'"),
        (
            "postgresql+psycopg2://h/d",
            "; write postgresql+psycopg://… and pip install 'celery-leases[postgresql]', or install",
        ),
    ],
)
def test_a_url_without_any_driver_installed_names_the_extra(monkeypatch, url, write) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("No module named 'driver'")

    monkeypatch.setattr(Dialect, "has_driver", lambda _: False)
    monkeypatch.setattr(connections, "create_engine", missing)
    with pytest.raises(LeaseConfigurationError, match=re.escape(write)):
        engine_for(url)


def test_the_error_for_another_database_shows_no_password_of_the_query() -> None:
    engine = create_engine("sqlite:////tmp/records.db?password=one&sslpassword=two")
    said = str(_wrong_database("key", engine, "'another'"))
    assert "records.db" in said
    assert "one&" not in said
    assert "two" not in said
