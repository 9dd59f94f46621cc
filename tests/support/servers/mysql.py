"""A private MySQL in a temporary directory: what is said of MariaDB is true of it but for its
programs.
"""

import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from tests.support.servers.local import ServerMissing
from tests.support.servers.mariadb import PLACES, MariaServer


def find_mysqld() -> Path:
    """MySQL's ``mysqld``; MariaDB installs a program of that name too. Raises ServerMissing."""
    found = shutil.which("mysqld") or shutil.which("mysqld", path=PLACES)
    if found:
        told = subprocess.run(
            [found, "--no-defaults", "--version"], check=False, capture_output=True, timeout=60
        )
        if told.returncode == 0 and b"MariaDB" not in told.stdout:
            return Path(found)
    raise ServerMissing(
        "no MySQL: install its server 8.0.17 or newer, and have its mysqld on the PATH"
    )


class MySQLServer(MariaServer):
    """A private MySQL on 127.0.0.1, as :class:`MariaServer` is a private MariaDB."""

    name = "MySQL"
    product_settings: ClassVar[dict[str, str]] = {
        "skip-name-resolve": "OFF",
        "mysqlx": "OFF",
        "secure-file-priv": "NULL",
        "tls-version": "",
    }

    def _server(self) -> Path:
        return find_mysqld()

    def _installation(self, data: Path) -> list[str | Path]:
        return [
            find_mysqld(),
            "--no-defaults",
            "--initialize-insecure",
            "--secure-file-priv=NULL",
            f"--datadir={data}",
        ]
