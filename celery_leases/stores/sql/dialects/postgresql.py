"""What PostgreSQL needs: how it is connected to, and how long it may be silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import cache
from typing import Any, Final

from sqlalchemy import URL, Dialect

DRIVERS: Final = ("psycopg", "psycopg2")

SILENCE: Final = 15.0
"""Seconds a statement may take; then its connection is given up, as one to MySQL is after its
``read_timeout``.
"""

LOCK_TIMEOUT: Final = 1500
"""Milliseconds; a contender that waits longer for a row is rescheduled."""

LOCK_TIMEOUT_OF_MIGRATIONS: Final = 60_000
"""Milliseconds for which an index that is made while others write waits for transactions that began
before it.
"""

LOCK_NOT_AVAILABLE: Final = "55P03"
UNDEFINED_COLUMN: Final = "42703"
DEADLOCK: Final = "40P01"
_NOT_SUPPORTED: Final = "0A000"

_LIBPQ: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


def connect_args(url: URL) -> dict[str, Any]:
    """What libpq can do about a server that is not there any more; the URL's own parameters come
    first.
    """
    return {name: value for name, value in _LIBPQ.items() if name not in url.query}


def connect(dialect: Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Connect as SQLAlchemy would, and bound every wait: for a row, and for a server that does not
    answer.

    A row that a user's own transaction has locked is waited for ``LOCK_TIMEOUT``, unless the
    ``options`` of the URL say otherwise, or a pooler refuses them.
    """
    opened = _patient_connection().connect if _tells_of_silence(dialect) else dialect.connect
    return _with_lock_timeout(opened, LOCK_TIMEOUT, args, given)


def connect_to_migrate(dialect: Dialect, _: Any, args: list[Any], given: dict[str, Any]) -> Any:
    """Connect for statements that may take long. A server that is gone is still found out by
    TCP.
    """
    return _with_lock_timeout(dialect.connect, LOCK_TIMEOUT_OF_MIGRATIONS, args, given)


def _with_lock_timeout(
    opened: Callable[..., Any], timeout: int, args: list[Any], given: dict[str, Any]
) -> Any:
    own = str(given.get("options") or "")
    if "lock_timeout" in own:
        return opened(*args, **given)
    try:
        return opened(*args, **{**given, "options": f"{own} -c lock_timeout={timeout}".strip()})
    except Exception as error:
        if own or "unsupported startup parameter" not in str(error):
            raise
        return opened(*args, **given)


def state_of(error: BaseException) -> str | None:
    """The SQLSTATE of a driver's error."""
    found = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return str(found) if found is not None else None


def is_outdated(error: Exception) -> bool:
    """Whether a connection has a statement prepared whose table has other columns by now; a new one
    has not.
    """
    return state_of(error) == _NOT_SUPPORTED


def _tells_of_silence(dialect: Dialect) -> bool:
    """Whether the driver says so when nothing comes: psycopg does since 3.2.11."""
    return dialect.driver == "psycopg" and getattr(dialect, "psycopg_version", (0,)) >= (3, 2, 11)


@cache
def _patient_connection() -> Any:
    """Psycopg's connection with an end to its patience: to TCP a server that never answers is
    alive.
    """
    import psycopg

    class SilentServer(psycopg.OperationalError, TimeoutError):
        """Not an answer; and asking once more would take as long again."""

    class PatientConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **given: Any) -> Any:
            return super().wait(self._within(gen, time.monotonic() + SILENCE), *args, **given)

        def _within(
            self, gen: Generator[Any, Any, Any], deadline: float
        ) -> Generator[Any, Any, Any]:
            """Pass on what *gen* waits for and gets; psycopg sends 0 every 0.1 s in which nothing
            has come.
            """
            try:
                wanted = next(gen)
                while True:
                    came = yield wanted
                    if not came and time.monotonic() > deadline:
                        self.close()  # whatever comes on it later is the answer to another question
                        raise SilentServer(f"the server has not answered for {SILENCE:g} s")
                    wanted = gen.send(came)
            except StopIteration as end:
                return end.value

    return PatientConnection
