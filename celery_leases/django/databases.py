"""Converts an entry of Django's ``DATABASES`` into the SQLAlchemy URL of the same database.

Options for Django's own connection (isolation level, pool, cursors, converters) are left out,
because connections to the records have their own. An option that describes how to connect to the
server, and that a URL cannot hold, is an error: the records might be in another database.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.urls import build_url

IN_MEMORY: Final = "sqlite://"

_DJANGO_ONLY: Final = {
    "postgresql": frozenset(
        {
            *("isolation_level", "pool", "server_side_binding", "cursor_factory"),
            *("prepare_threshold", "context", "row_factory", "autocommit"),
            *("connection_factory", "client_encoding"),
        }
    ),
    "mysql": frozenset(
        {
            *("isolation_level", "conv", "use_unicode", "charset", "collation", "cursorclass"),
            *("client_flag", "autocommit", "sql_mode", "compress"),
        }
    ),
}
"""Options for Django's own connection only, by the ``vendor`` of a database."""

_MYSQL_OPTIONS: Final = frozenset(
    {
        *("unix_socket", "connect_timeout", "read_timeout", "write_timeout", "init_command"),
        *("local_infile", "read_default_file", "read_default_group"),
        *("bind_address", "program_name"),
    }
)
_VERIFYING: Final = ("VERIFY_CA", "VERIFY_IDENTITY")
_SSL_MODES: Final = ("DISABLED", "PREFERRED", "REQUIRED", *_VERIFYING)


def url_of(alias: str, vendor: str, given: Mapping[str, Any]) -> str:
    """The SQLAlchemy URL for the database *alias*, whose settings in ``DATABASES`` are *given*.

    *vendor* is that of Django's connection: ``postgresql``, ``mysql`` or ``sqlite``. Raises
    :class:`~celery_leases.errors.LeaseConfigurationError` for other vendors, and for options that
    the URL cannot hold.
    """
    converters: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
        "postgresql": _postgresql,
        "mysql": _mysql,
        "sqlite": _sqlite,
    }
    if vendor not in converters:
        raise LeaseConfigurationError(
            f"DATABASES[{alias!r}] is a database of the kind {vendor!r}, but records need PostgreSQL, MySQL, MariaDB "
            'or SQLite; name such a database: CELERY_LEASES = {"database": "<alias>"}'
        )
    return converters[vendor](alias, given)


def _postgresql(alias: str, given: Mapping[str, Any]) -> str:
    options = _options(alias, "postgresql", given)
    role = options.pop("assume_role", None)
    query = {
        name: _text(alias, name, value) for name, value in options.items() if value is not None
    }
    for name in ("dbname", "user", "password", "host", "port"):
        if name in query:
            raise LeaseConfigurationError(
                f"DATABASES[{alias!r}]: OPTIONS has {name}, which Django overwrites; write it beside OPTIONS"
            )
    if role is not None:
        query["options"] = f"{query.get('options', '')} -c role={_in_options(str(role))}".strip()
    host, port = str(given.get("HOST") or ""), str(given.get("PORT") or "")
    if (
        host.startswith(("/", "@")) or "," in host or "," in port
    ):  # the directory of a socket, or several servers
        query["host"] = host
        if port:
            query["port"] = port
        host = port = ""
    return build_url("postgresql", query=query, **_user_and_server(alias, given, host, port))


def _mysql(alias: str, given: Mapping[str, Any]) -> str:
    options = _options(alias, "mysql", given)
    # mysqlclient's older names.
    names = {
        "user": options.pop("user", None),
        "password": options.pop("passwd", options.pop("password", None)),
    }
    names |= {"name": options.pop("database", options.pop("db", None))}
    if any(value is not None for value in names.values()):
        raise LeaseConfigurationError(
            f"DATABASES[{alias!r}]: OPTIONS names the user, the password or the database; write USER, PASSWORD and "
            "NAME beside OPTIONS"
        )
    host = str(options.pop("host", "") or given.get("HOST") or "")
    port = str(options.pop("port", "") or given.get("PORT") or "")
    tls = _tls_of_mysql(alias, options)
    if host.startswith("/"):
        options["unix_socket"], host, port = host, "", ""
    unknown = sorted(options.keys() - _MYSQL_OPTIONS)
    if unknown:
        raise _cannot_pass_on(alias, unknown[0])
    query = {
        name: _text(alias, name, value) for name, value in options.items() if value is not None
    }
    if "init_command" in query:
        query["init_command"] = query["init_command"].rstrip("; ")
    return build_url("mysql", query=query | tls, **_user_and_server(alias, given, host, port))


def _sqlite(_: str, given: Mapping[str, Any]) -> str:
    name = os.fspath(given.get("NAME") or "")
    if name in ("", ":memory:"):
        return IN_MEMORY
    if name.startswith("file:"):
        path, _, query = name.partition("?")
        if "mode=memory" in query or path == "file::memory:":
            return IN_MEMORY
        wanted = dict(part.partition("=")[::2] for part in query.split("&") if part)
        return build_url("sqlite", database=path, query={**wanted, "uri": "true"})
    return build_url("sqlite", database=name)


def _options(alias: str, vendor: str, given: Mapping[str, Any]) -> dict[str, Any]:
    found = given.get("OPTIONS") or {}
    if not isinstance(found, Mapping):
        raise LeaseConfigurationError(
            f"DATABASES[{alias!r}]: OPTIONS is of type {type(found).__name__}: write a dict"
        )
    return {name: value for name, value in found.items() if name not in _DJANGO_ONLY[vendor]}


def _user_and_server(alias: str, given: Mapping[str, Any], host: str, port: str) -> dict[str, Any]:
    if port and not port.isdigit():
        raise LeaseConfigurationError(f"DATABASES[{alias!r}]: PORT={port!r}: write a number")
    return {
        "username": str(given.get("USER") or "") or None,
        "password": str(given.get("PASSWORD") or "") or None,
        "host": host or None,
        "port": int(port) if port else None,
        "database": str(given.get("NAME") or "") or None,
    }


def _tls_of_mysql(alias: str, options: dict[str, Any]) -> dict[str, str]:
    """The TLS part of the URL's query, for the installed driver; removes it from *options*.

    PyMySQL ignores the certificate authority that SQLAlchemy passes on if PyMySQL's own options
    for verification are given. So the authority alone switches verification on, and
    ``ssl_check_hostname`` decides about the host name.
    """
    mode, given = options.pop("ssl_mode", None), options.pop("ssl", None)
    names = ("ca", "capath", "cert", "key", "cipher", "check_hostname")
    flat = {name: options.pop(f"ssl_{name}", None) for name in names}
    verify, identity = (
        options.pop("ssl_verify_cert", None),
        options.pop("ssl_verify_identity", None),
    )
    disabled = options.pop("ssl_disabled", None)
    if given is not None and given is not False:
        nested = {"check_hostname": False} if given is True or given == {} else given
        if not isinstance(nested, Mapping) or not nested.keys() <= {*names}:
            raise LeaseConfigurationError(
                f"DATABASES[{alias!r}]: the option ssl cannot be passed on to the records' connections; write a dict "
                f"with some of {', '.join(names)}, or name the database by CELERY_LEASES_DATABASE_URL"
            )
        flat |= nested
    wanted = "DISABLED" if disabled else str(mode).upper() if mode is not None else None
    wanted = wanted or ("VERIFY_IDENTITY" if identity else "VERIFY_CA" if verify else None)
    if wanted is not None and wanted not in _SSL_MODES:
        raise LeaseConfigurationError(
            f"DATABASES[{alias!r}]: ssl_mode={mode!r}: write one of {', '.join(_SSL_MODES)}"
        )
    found = {
        f"ssl_{name}": _text(alias, f"ssl_{name}", value)
        for name, value in flat.items()
        if value is not None
    }
    if _by_mysqlclient():
        return found | ({"ssl_mode": wanted} if wanted is not None else {})
    if wanted == "DISABLED":
        return {"ssl_disabled": "true"}
    if wanted in _VERIFYING and not {"ssl_ca", "ssl_capath"} & found.keys():
        if found:
            raise LeaseConfigurationError(
                f"DATABASES[{alias!r}]: ssl_mode={wanted!r} without a certificate authority; write its file, "
                'OPTIONS = {"ssl": {"ca": "/path/to/ca.pem", ...}}'
            )
        return {"ssl_verify_cert": "true"} | (
            {"ssl_verify_identity": "true"} if wanted == _VERIFYING[1] else {}
        )
    if found or wanted == "REQUIRED":
        found.setdefault("ssl_check_hostname", "true" if wanted == "VERIFY_IDENTITY" else "false")
    return found


def _by_mysqlclient() -> bool:
    """Whether connections to the records use mysqlclient, because PyMySQL is not installed."""
    try:
        import_module("pymysql")
    except ImportError:
        return True
    return False


def _text(alias: str, name: str, value: Any) -> str:
    """The value of an option for the query of a URL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float | os.PathLike):
        return str(os.fspath(value) if isinstance(value, os.PathLike) else value)
    raise _cannot_pass_on(alias, name)


def _cannot_pass_on(alias: str, name: str) -> LeaseConfigurationError:
    return LeaseConfigurationError(
        f"DATABASES[{alias!r}]: the option {name} cannot be passed on to the records' connections; write it in another "
        "way, or name the database by CELERY_LEASES_DATABASE_URL"
    )


def _in_options(text: str) -> str:
    """*text* escaped as one word of libpq's ``options``."""
    return text.replace("\\", "\\\\").replace(" ", "\\ ")
