"""A private PgBouncer in front of a private PostgreSQL."""

import os
import shutil
from pathlib import Path

from tests.support.process import GuardedProcess
from tests.support.servers.local import LocalServer, ServerMissing
from tests.support.servers.postgres import PostgresServer, unprivileged

_SETTINGS = """[databases]
* = host=127.0.0.1 port={postgres} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
server_round_robin = 1
"""


class PgBouncer(LocalServer):
    """A PgBouncer on 127.0.0.1 that pools transactions over *connections* connections to each
    database of *postgres*, in turn.
    """

    name = "PgBouncer"

    def __init__(self, postgres: PostgresServer, connections: int = 2) -> None:
        super().__init__()
        self._postgres = postgres
        self._connections = connections

    @property
    def url(self) -> str:
        """``postgresql+psycopg://postgres@127.0.0.1:<port>/postgres``."""
        return self.url_of(self._postgres.url)

    def url_of(self, database_url: str) -> str:
        """The URL through this server, of a database of its PostgreSQL server."""
        return database_url.replace(f":{self._postgres.port}/", f":{self.port}/")

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise ServerMissing("no PgBouncer: install it (Debian: apt-get install pgbouncer)")
        settings = home / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(postgres=self._postgres.port, port=port, connections=self._connections)
        )
        user = unprivileged()
        if user:
            os.chown(home, *user)
        return GuardedProcess(
            [program, settings], log=home / "server.log", cwd=home, user=user, homes=[home]
        )

    def _await_ready(self, process: GuardedProcess) -> None:
        process.wait_for_log("process up", self.start_timeout)
