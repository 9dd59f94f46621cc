"""A private PostgreSQL in a temporary directory."""

import os
import pwd
import re
import shutil
import signal
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from tests.support.process import GuardedProcess, NotReady
from tests.support.servers.local import LocalServer, ServerMissing

_PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")


def find_postgres_binaries() -> Path:
    """The directory of ``initdb`` and ``postgres``: the one on PATH, otherwise the newest in the
    directories of distributions.

    Raises ServerMissing if there is none.
    """
    candidates = []
    if found := shutil.which("initdb"):
        candidates.append(Path(found).resolve().parent)
    for place in _PLACES:
        versions = Path("/").glob(place.lstrip("/"))
        candidates += sorted(
            versions, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], reverse=True
        )
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    raise ServerMissing("no PostgreSQL: install its server (Debian: apt-get install postgresql)")


def unprivileged() -> tuple[int, int] | None:
    """The user to run PostgreSQL as, because it refuses to run as root; ``None`` for the current
    user.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise ServerMissing(
        "PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody' to run it as"
    )


class PostgresServer(LocalServer):
    """A private PostgreSQL on 127.0.0.1: trust authentication, no fsync, superuser ``postgres``.

    ``settings`` are server settings such as ``{"max_connections": "20"}``, which replace defaults.
    """

    name = "PostgreSQL"
    stop_signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}  # noqa: RUF012

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = {
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "200",
            "shared_buffers": "32MB",
            "unix_socket_directories": "",
            "lc_messages": "C",
            **(settings or {}),
        }
        self._numbers = count(1)

    @property
    def url(self) -> str:
        """``postgresql+psycopg://postgres@127.0.0.1:<port>/postgres``."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """The SQLAlchemy URL of one database of this server."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL. Raises psycopg.Error."""
        import psycopg  # not at the top: the demos use these modules, and no PostgreSQL

        name = f"leases_{next(self._numbers)}"
        where = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"
        with psycopg.connect(where, autocommit=True, connect_timeout=60) as connection:
            # Copying the files is cheaper than logging each page of them.
            how = " STRATEGY file_copy" if connection.info.server_version >= 150000 else ""
            connection.execute(f"CREATE DATABASE {name}{how}".encode())
        return self.database_url(name)

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        binaries = find_postgres_binaries()
        user = unprivileged()
        data = home / "data"
        if not data.exists():
            if user:
                os.chown(home, *user)
            self._initdb(binaries, data, user)
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return GuardedProcess(
            [
                binaries / "postgres",
                "-D",
                data,
                "-p",
                str(port),
                "--listen_addresses=127.0.0.1",
                *settings,
            ],
            log=home / "server.log",
            cwd=home,
            user=user,
            homes=[home],
        )

    @staticmethod
    def _initdb(binaries: Path, data: Path, user: tuple[int, int] | None) -> None:
        options = [
            "--username=postgres",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
        ]
        home = data.parent
        initdb = GuardedProcess(
            [binaries / "initdb", "--pgdata", data, *options],
            log=home / "initdb.log",
            cwd=home,
            user=user,
            homes=[home],
        )
        try:
            code = initdb.wait(120)
        finally:
            initdb.end()
        if code:
            raise NotReady(f"initdb failed with {code}:\n{initdb.logs()}")

    def _await_ready(self, process: GuardedProcess) -> None:
        process.wait_for_log("database system is ready to accept connections", self.start_timeout)
