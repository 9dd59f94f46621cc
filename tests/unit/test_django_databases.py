"""The URL of the records made of Django's settings: the same server, user, database and TLS, or a
clear error.
"""

from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.test.utils import _TestState
from sqlalchemy import create_engine, make_url

from celery_leases.django.configuration import under_test
from celery_leases.django.databases import url_of
from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.urls import escaped_url

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


def connected_with(vendor: str, **given: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the driver is given for these settings of an alias."""
    url = make_url(url_of("default", vendor, given)).set(drivername=DRIVERS[vendor])
    args, kwargs = create_engine(url).dialect.create_connect_args(url)
    for ours in ("context", "client_flag", "check_same_thread"):
        kwargs.pop(ours, None)
    return list(args), dict(kwargs)


def of_postgres(**given: Any) -> dict[str, Any]:
    return connected_with("postgresql", **given)[1]


def of_mysql(**given: Any) -> dict[str, Any]:
    """The same for MySQL and MariaDB, by PyMySQL."""
    return connected_with("mysql", **given)[1]


def test_every_character_of_a_password_survives() -> None:
    given = {
        "NAME": "shop",
        "USER": "a:b@c",
        "PASSWORD": "p@:/?#%20 ü",
        "HOST": "db.example",
        "PORT": 6543,
    }
    wanted = {
        "dbname": "shop",
        "user": "a:b@c",
        "password": "p@:/?#%20 ü",
        "host": "db.example",
        "port": 6543,
    }
    assert of_postgres(**given) == wanted


def test_options_of_libpq_are_passed_on() -> None:
    options = {
        "sslmode": "verify-full", "sslrootcert": Path("/etc/ca.pem"),
        "options": "-c search_path=leases,public", "connect_timeout": 3, "passfile": "/etc/pgpass",
        "isolation_level": 3, "pool": {"min_size": 2}, "server_side_binding": True,
        "cursor_factory": object(), "prepare_threshold": None,
    }  # fmt: skip
    assert of_postgres(NAME="shop", HOST="db", OPTIONS=options) == {
        "dbname": "shop", "host": "db", "sslmode": "verify-full", "sslrootcert": "/etc/ca.pem",
        "options": "-c search_path=leases,public", "connect_timeout": "3",
        "passfile": "/etc/pgpass",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"NAME": "shop"}, {"dbname": "shop"}),
        ({"NAME": "shop", "HOST": "/run/pg", "PORT": "5433"}, {"dbname": "shop", "host": "/run/pg", "port": "5433"}),
        ({"NAME": "s", "HOST": "a,b", "PORT": "1,2"}, {"dbname": "s", "host": "a,b", "port": "1,2"}),
        ({"NAME": "", "OPTIONS": {"service": "shop"}}, {"service": "shop"}),
        ({"NAME": "s", "OPTIONS": {"assume_role": "the app"}}, {"dbname": "s", "options": r"-c role=the\ app"}),
    ],
    ids=["socket by default", "socket", "several hosts", "service", "role"],
)  # fmt: skip
def test_ways_to_a_postgresql_server(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert of_postgres(**given) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"charset": "utf8mb4", "sql_mode": "TRADITIONAL"}, {}),
        ({"init_command": "SET ROLE app;"}, {"init_command": "SET ROLE app"}),
        ({"ssl": {"ca": "/ca"}}, {"ssl": {"ca": "/ca", "check_hostname": False}}),
        ({"ssl": {}}, {"ssl": {"check_hostname": False}}),
        ({"ssl_mode": "REQUIRED"}, {"ssl": {"check_hostname": False}}),
        ({"ssl_mode": "DISABLED", "ssl": {"ca": "/ca"}}, {"ssl_disabled": "true"}),
        ({"ssl_mode": "PREFERRED"}, {}),
        ({"ssl_mode": "VERIFY_IDENTITY", "ssl": {"ca": "/ca"}}, {"ssl": {"ca": "/ca", "check_hostname": True}}),
        ({"ssl_mode": "verify_ca", "ssl_ca": "/ca"}, {"ssl": {"ca": "/ca", "check_hostname": False}}),
        ({"ssl_mode": "VERIFY_CA"}, {"ssl_verify_cert": "true"}),
        ({"ssl_verify_cert": False, "ssl_verify_identity": False}, {}),
        ({"read_default_file": "/etc/my.cnf"}, {"read_default_file": "/etc/my.cnf"}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_mysql_are_passed_on(options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert of_mysql(NAME="shop", HOST="db", OPTIONS=options) == {
        "database": "shop",
        "host": "db",
        **wanted,
    }


def test_a_socket_of_mysql_is_a_host_with_a_slash() -> None:
    assert of_mysql(NAME="shop", HOST="/run/my.sock", PORT="") == {
        "database": "shop",
        "unix_socket": "/run/my.sock",
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (Path("/srv/shop data.db"), "/srv/shop data.db"),
        ("shop.db", str(Path("shop.db").resolve())),
        ("file:/srv/shop.db?mode=rw", "file:/srv/shop.db?mode=rw"),
        (":memory:", ":memory:"),
        ("file:memorydb_default?mode=memory&cache=shared", ":memory:"),
    ],
    ids=str,
)
def test_files_of_sqlite(name: Any, wanted: str) -> None:
    assert connected_with("sqlite", NAME=name)[0] == [wanted]


@pytest.mark.parametrize(
    ("vendor", "given", "named"),
    [
        ("oracle", {"NAME": "x"}, "kind 'oracle'"),
        ("postgresql", {"NAME": "x", "OPTIONS": {"sslcontext": object()}}, "the option sslcontext"),
        ("postgresql", {"NAME": "x", "OPTIONS": {"password": "secret"}}, "OPTIONS has password"),
        ("postgresql", {"NAME": "x", "PORT": "five"}, "PORT='five'"),
        ("postgresql", {"NAME": "x", "OPTIONS": ["sslmode"]}, "OPTIONS is of type list"),
        ("mysql", {"NAME": "x", "OPTIONS": {"named_pipe": True}}, "the option named_pipe"),
        ("mysql", {"NAME": "x", "OPTIONS": {"passwd": "secret"}}, "write USER, PASSWORD and NAME"),
        ("mysql", {"NAME": "x", "OPTIONS": {"ssl": object()}}, "the option ssl"),
        ("mysql", {"NAME": "x", "OPTIONS": {"ssl_mode": "MAYBE"}}, "ssl_mode='MAYBE'"),
        (
            "mysql",
            {"NAME": "x", "OPTIONS": {"ssl_mode": "VERIFY_CA", "ssl": {"key": "k"}}},
            "without a certificate authority",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_passed_on_is_named(vendor: str, given: dict[str, Any], named: str) -> None:
    """The records would be somewhere else, or reached in another way."""
    with pytest.raises(LeaseConfigurationError, match=named) as raised:
        url_of("leases", vendor, given)
    assert "DATABASES['leases']" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_url_is_rewritten_as_it_was() -> None:
    options = {"options": "-c search_path=a,b", "sslmode": "require"}
    given = {"NAME": "shop", "USER": "a:b@c", "PASSWORD": "p@:/?#%20 ü", "OPTIONS": options}
    url = make_url(url_of("default", "postgresql", given))
    assert make_url(escaped_url(url)) == url
    assert url.password == "p@:/?#%20 ü"


def test_a_mailbox_in_memory_is_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "outbox", [], raising=False)
    assert not under_test()
    monkeypatch.setattr(_TestState, "saved_data", object(), raising=False)
    assert under_test()
