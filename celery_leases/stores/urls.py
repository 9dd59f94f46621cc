"""How the URLs of settings are shown: which server, and nothing that lets anybody in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlalchemy import URL

HIDDEN: Final = "…"
_SECRET: Final = re.compile("pass|pwd|secret|token|credential", re.IGNORECASE)


def shown(url: object) -> str:
    """*url* as it was written, without users, passwords and query, however badly it is formed."""
    text = url if isinstance(url, str) else ""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if not re.fullmatch(r"[A-Za-z0-9.+_-]{0,40}", scheme):
        scheme = HIDDEN
    where, _, query = rest.partition("?")
    # An @ behind a question mark: one of the two belongs to a password.
    host = HIDDEN if "@" in query or "#" in rest else where.rpartition("@")[2]
    return f"{scheme}{separator}{host}"


def shown_database(url: URL) -> str:
    """The URL of a database without its password and its query, which may hold another one."""
    return url.set(query={}).render_as_string(hide_password=True)


def without_secrets(text: str, url: URL) -> str:
    """*text* of a driver without the passwords in *url*."""
    found = [url.password] + [value for name, value in url.query.items() if _SECRET.search(name)]
    for secret in found:
        for one in (secret,) if isinstance(secret, str) else secret or ():
            text = text.replace(one, "**") if len(one) > 2 else text
    return text
