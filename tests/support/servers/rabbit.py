"""A private RabbitMQ node, or the one that already runs on this machine."""

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tests.support.process import GuardedProcess
from tests.support.servers.local import LocalServer, ServerMissing, free_port

RUNNING_URL = "amqp://guest:guest@127.0.0.1:5672//"
URL_VARIABLE = "CELERY_LEASES_TEST_AMQP"


def find_rabbit_binary() -> Path:
    """The server's own script, instead of the distribution's wrapper, which requires its own user
    and directories.

    Raises ServerMissing if there is none.
    """
    packaged = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    if packaged.exists():
        return packaged
    if found := shutil.which("rabbitmq-server"):
        return Path(found)
    raise ServerMissing("no RabbitMQ: install its server (Debian: apt-get install rabbitmq-server)")


class RabbitServer(LocalServer):
    """A private RabbitMQ node on 127.0.0.1 with its own name, data, Erlang cookie and ``epmd``, and
    without plugins.

    A start takes five to ten seconds. Durable queues and persistent messages survive ``restart``
    and ``kill``.
    """

    name = "RabbitMQ"
    start_timeout = 90.0

    def __init__(self) -> None:
        super().__init__()
        # The node's name is part of its data, so a restart must not change it.
        self._node = f"leases-{uuid4().hex[:8]}@localhost"
        self._ports: tuple[int, int] | None = None

    @property
    def url(self) -> str:
        """``amqp://guest:guest@127.0.0.1:<port>//``."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        binary = find_rabbit_binary()
        if self._ports is None:
            self._ports = (free_port(), free_port())
        distribution, epmd = self._ports
        (home / "enabled_plugins").write_text("[].\n")
        (home / "rabbitmq.conf").write_text("")
        (home / "env.conf").write_text("")
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")
        }
        return GuardedProcess(
            [binary],
            log=home / "server.log",
            cwd=home,
            env=inherited
            | {
                "HOME": str(home),
                "ERL_EPMD_PORT": str(epmd),
                "ERL_EPMD_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODENAME": self._node,
                "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODE_PORT": str(port),
                "RABBITMQ_DIST_PORT": str(distribution),
                "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
                "RABBITMQ_LOG_BASE": str(home / "log"),
                "RABBITMQ_LOGS": "-",
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
                "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
                "RABBITMQ_CONF_ENV_FILE": str(home / "env.conf"),
                # Erlang's schedulers would busy-wait while idle, and slow down the tests.
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
            },
            homes=[home],
        )

    def _await_ready(self, process: GuardedProcess) -> None:
        process.wait_for_log(
            r"Server startup complete|completed with \d+ plugins", self.start_timeout
        )


@dataclass(frozen=True)
class RunningRabbit:
    """A RabbitMQ node that was already running.

    ``isolated``: ``url`` has a virtual host that only this run uses. Otherwise the virtual host is
    shared, and the names of queues must be unique.
    """

    url: str
    isolated: bool = False
    vhost: str | None = None

    def isolate(self) -> "RunningRabbit":
        """The same node with a new virtual host, made by ``rabbitmqctl``; returns self if that is
        not allowed.
        """
        control = shutil.which("rabbitmqctl")
        if self.isolated or control is None:
            return self
        vhost = f"celery-leases-{uuid4().hex[:8]}"
        user = self.url.partition("://")[2].partition(":")[0]
        try:
            _run(control, "add_vhost", vhost)
            _run(control, "set_permissions", "-p", vhost, user, ".*", ".*", ".*")
        except (subprocess.SubprocessError, OSError):
            return self
        base = self.url.partition("://")
        return RunningRabbit(
            f"amqp://{base[2].partition('/')[0]}/{vhost}", isolated=True, vhost=vhost
        )

    def remove(self) -> None:
        """Delete the virtual host that ``isolate`` made, with its queues."""
        if self.vhost and (control := shutil.which("rabbitmqctl")):
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                _run(control, "delete_vhost", self.vhost)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def find_running_rabbit() -> RunningRabbit | None:
    """The broker at ``$CELERY_LEASES_TEST_AMQP``, or at the default port of 127.0.0.1; ``None`` if
    connecting fails.
    """
    from amqp.exceptions import AMQPError
    from kombu import Connection

    url = os.environ.get(URL_VARIABLE, RUNNING_URL)
    try:
        with Connection(url, connect_timeout=2) as connection:
            connection.connect()
    except (OSError, AMQPError):
        return None
    return RunningRabbit(url)
