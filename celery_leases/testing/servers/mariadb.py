"""A private MariaDB in a temporary directory."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from celery_leases.testing.process import GuardedProcess, NotReady
from celery_leases.testing.servers.local import LocalServer, ServerMissing

_PLACES = "/usr/sbin:/usr/local/sbin:/usr/libexec:/opt/homebrew/opt/mariadb/bin"


def find_mariadb_binary(name: str) -> Path:
    """A program of MariaDB's: ``mariadbd``, ``mariadb-install-db`` or ``mariadb``. Raises ServerMissing."""
    if found := shutil.which(name) or shutil.which(name, path=_PLACES):
        return Path(found)
    raise ServerMissing("no MariaDB: install its server (Debian: apt-get install mariadb-server)")


class MariaServer(LocalServer):
    """A private MariaDB on 127.0.0.1: user ``root`` without a password, commits written but not synced to the disk.

    ``settings`` are server settings such as ``{"max_connections": "20"}``; they go over the defaults.
    """

    name = "MariaDB"
    start_timeout = 60.0

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = {
            "bind-address": "127.0.0.1",
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "16M",
            "max-connections": "200",
            "performance-schema": "OFF",
            "skip-name-resolve": "ON",
            "skip-log-bin": "ON",
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
        """Create an empty database and return its URL. Raises subprocess.CalledProcessError."""
        name = f"leases_{next(self._numbers)}"
        where = ["--no-defaults", "--protocol=tcp", "--host=127.0.0.1", f"--port={self.port}", "--user=root"]
        client = find_mariadb_binary("mariadb")
        subprocess.run(
            [client, *where, f"--execute=CREATE DATABASE {name}"], check=True, capture_output=True, timeout=60
        )
        return self.database_url(name)

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        server = find_mariadb_binary("mariadbd")
        data = home / "data"
        if not data.exists():
            self._install(data)
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        own = [f"--datadir={data}", f"--port={port}", f"--socket={home / 'socket'}", f"--pid-file={home / 'pid'}"]
        return GuardedProcess(
            [server, "--no-defaults", *_as_root(), *own, *settings],
            log=home / "server.log",
            cwd=home,
            env=_environment(home),
            homes=[home],
        )

    @staticmethod
    def _install(data: Path) -> None:
        options = [f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db"]
        home = data.parent
        install = GuardedProcess(
            [find_mariadb_binary("mariadb-install-db"), "--no-defaults", *_as_root(), *options],
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
            raise NotReady(f"mariadb-install-db failed with {code}:\n{install.logs()}")

    def _await_ready(self, process: GuardedProcess) -> None:
        process.wait_for_log("ready for connections", self.start_timeout)


def _as_root() -> list[str]:
    """MariaDB runs as root only when it is told to."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _environment(home: Path) -> dict[str, str]:
    """A server that starts removes the temporary tables in its directory, whosever they are: it gets its own."""
    own = home / "tmp"
    own.mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(own)}
