"""A private MySQL in a temporary directory. It differs from MariaDB only in its programs."""

import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from tests.support.servers.local import ServerMissing
from tests.support.servers.mariadb import PLACES, MariaServer


def find_mysqld() -> Path:
    """The path of MySQL's ``mysqld``. MariaDB installs a program with the same name. Raises
    ServerMissing.
    """
    found = shutil.which("mysqld") or shutil.which("mysqld", path=PLACES)
    if found:
        version = subprocess.run(
            [found, "--no-defaults", "--version"], check=False, capture_output=True, timeout=60
        )
        if version.returncode == 0 and b"MariaDB" not in version.stdout:
            return Path(found)
    raise ServerMissing(
        "no MySQL: install its server 8.0.17 or newer, and put its mysqld on the PATH"
    )


class MySQLServer(MariaServer):
    """A private MySQL on 127.0.0.1, as :class:`MariaServer` is a private MariaDB."""

    name = "MySQL"
    # Ubuntu's AppArmor profile allows it no files in /dev/shm.
    homes = None
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
