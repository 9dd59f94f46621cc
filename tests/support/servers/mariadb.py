"""A private MariaDB in a temporary directory."""

import os
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import ClassVar

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tests.support.process import GuardedProcess, NotReady
from tests.support.servers.local import LocalServer, ServerMissing

PLACES = "/usr/sbin:/usr/local/sbin:/usr/libexec:/opt/homebrew/opt/mariadb/bin:/opt/homebrew/opt/mysql/bin"
"""Directories of server programs that are not on every user's PATH."""


def find_mariadb_binary(name: str) -> Path:
    """The path of ``mariadbd`` or ``mariadb-install-db``. Raises ServerMissing."""
    if found := shutil.which(name) or shutil.which(name, path=PLACES):
        return Path(found)
    raise ServerMissing("no MariaDB: install its server (Debian: apt-get install mariadb-server)")


class MariaServer(LocalServer):
    """A private MariaDB on 127.0.0.1, with the user ``root`` without a password. Commits are not
    synced to disk.

    ``settings`` are server settings such as ``{"max_connections": "20"}``, which replace defaults.
    """

    name = "MariaDB"
    start_timeout = 60.0
    product_settings: ClassVar[dict[str, str]] = {"innodb-log-file-size": "16M"}
    """Default settings that only this product has."""

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = {
            "bind-address": "127.0.0.1",
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-buffer-pool-size": "64M",
            "max-connections": "200",
            "performance-schema": "OFF",
            "skip-name-resolve": "ON",
            "skip-log-bin": "ON",
            **self.product_settings,
            **(settings or {}),
        }
        self._numbers = count(1)

    @property
    def url(self) -> str:
        """``mysql+pymysql://root@127.0.0.1:<port>/mysql``."""
        return self.database_url("mysql")

    def database_url(self, database: str) -> str:
        """The SQLAlchemy URL of one database of this server."""
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL. Raises sqlalchemy.exc.OperationalError."""
        name = f"leases_{next(self._numbers)}"
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return self.database_url(name)

    def _server(self) -> Path:
        return find_mariadb_binary("mariadbd")

    def _installation(self, data: Path) -> list[str | Path]:
        options = [
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
        return [find_mariadb_binary("mariadb-install-db"), "--no-defaults", *options]

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        server = self._server()
        data = home / "data"
        if not data.exists():
            self._install(data)
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        own = [
            f"--datadir={data}",
            f"--port={port}",
            f"--socket={home / 'socket'}",
            f"--pid-file={home / 'pid'}",
        ]
        return GuardedProcess(
            [server, "--no-defaults", *_as_root(), *own, *settings],
            log=home / "server.log",
            cwd=home,
            env=_environment(home),
            homes=[home],
        )

    def _install(self, data: Path) -> None:
        home = data.parent
        install = GuardedProcess(
            [*self._installation(data), *_as_root()],
            log=home / "install.log",
            cwd=home,
            env=_environment(home),
            homes=[home],
        )
        try:
            code = install.wait(120)
        finally:
            install.end()
        if code:
            raise NotReady(f"installing {self.name} failed with {code}:\n{install.logs()}")

    def _await_ready(self, process: GuardedProcess) -> None:
        process.wait_for_log("ready for connections", self.start_timeout)


def _as_root() -> list[str]:
    """The option without which both products refuse to run as root."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _environment(home: Path) -> dict[str, str]:
    """An environment with a separate temporary directory, because a server that starts removes all
    temporary tables from it.
    """
    own = home / "tmp"
    own.mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(own)}
