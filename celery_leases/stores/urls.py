"""URLs of settings: for display without passwords, and built from their parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    from sqlalchemy import URL

HIDDEN: Final = "…"
_SECRET: Final = re.compile("pass|pwd|secret|token|credential", re.IGNORECASE)


def display_url(url: object) -> str:
    """*url* without users, passwords and query, also if it is malformed."""
    text = url if isinstance(url, str) else ""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if not re.fullmatch(r"[A-Za-z0-9.+_-]{0,40}", scheme):
        scheme = HIDDEN
    where, _, query = rest.partition("?")
    # With an @ after the question mark, one of the two characters belongs to a password.
    host = HIDDEN if "@" in query or "#" in rest else where.rpartition("@")[2]
    return f"{scheme}{separator}{host}"


def display_database_url(url: URL) -> str:
    """The URL of a database without its password, and without its query, which may contain one."""
    return url.set(query={}).render_as_string(hide_password=True)


def build_url(
    backend: str,
    *,
    database: str | None,
    username: str | None = None,
    password: str | None = None,
    host: str | None = None,
    port: int | None = None,
    query: Mapping[str, str | tuple[str, ...]] | None = None,
) -> str:
    """A SQLAlchemy URL from its parts, with the password. The parts may contain any characters."""
    from sqlalchemy import URL

    made = URL.create(backend, None, None, host, port, database, dict(query or {}))
    written = made.render_as_string(hide_password=False)
    if username is None and password is None:
        return written
    # SQLAlchemy 2.0.0 does not escape a %, but reads it as the start of an escape.
    who = quote(username or "", safe="")
    who += f":{quote(password, safe='')}" if password is not None else ""
    return written.replace("://", f"://{who}@", 1)


def escaped_url(url: URL) -> str:
    """*url* as text, correctly escaped, with its password."""
    return build_url(
        url.drivername,
        database=url.database,
        username=url.username,
        password=url.password,
        host=url.host,
        port=url.port,
        query=url.query,
    )


def without_secrets(text: str, url: URL) -> str:
    """A driver's *text* without the passwords of *url*."""
    found = [url.password] + [value for name, value in url.query.items() if _SECRET.search(name)]
    for secret in found:
        for one in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(one, "**") if len(one) > 2 else text
    return text
