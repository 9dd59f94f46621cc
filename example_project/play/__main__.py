"""``make play``: a private Redis, two workers, the provider and the page, until Ctrl-C.

A worker that is killed starts again after a few seconds.
"""

from __future__ import annotations

import socket
import sys
import time

import click

from example_project.demo.stage import Stage
from example_project.demo.story import end_in_order
from tests.support.process import GuardedProcess, NotReady
from tests.support.servers import ServerMissing

PORT = 8321
GONE_FOR = 4.0
"""Seconds after which a killed worker starts again."""


class PlayStage(Stage):
    """A stage with the provider on it."""

    modules = ("example_project.play.tasks", "example_project.play.worker_commands")
    concurrency = 4

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[GuardedProcess] = []

    def furnish(self) -> dict[str, str]:
        """Start the provider."""
        return {
            "PROVIDER_URL": f"http://127.0.0.1:{self._serve('provider', '127.0.0.1', '0')}",
        }

    def open_page(self, port: int) -> int:
        """Start the page's server, and return its port."""
        return self._serve("web", "127.0.0.1", str(port))

    def _serve(self, name: str, *arguments: str) -> int:
        server = self.start(name, [f"example_project.play.{name}", *arguments])
        self.servers.append(server)
        return int(server.wait_for_log(r"listens on port (\d+)$", 30)[1])

    def keep(self) -> None:
        """Restart killed workers, until one of the servers ends."""
        gone: dict[str, float] = {}
        while all(server.alive for server in self.servers):
            for name, worker in self.workers.items():
                if not worker.alive and time.monotonic() > gone.setdefault(
                    name, time.monotonic() + GONE_FOR
                ):
                    worker.launch()
                    del gone[name]
            time.sleep(0.2)


def free(port: int) -> int:
    """*port*, or 0 (any free port) if another process uses it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


@click.command()
@click.option(
    "--port", default=PORT, show_default=True, help="The port of the page; 0: any free port."
)
def main(*, port: int) -> None:
    """Start everything, print the address of the page, and run until Ctrl-C."""
    click.echo("starting a private Redis, two workers and the page; this takes about ten seconds")
    end_in_order()
    try:
        with PlayStage() as stage:
            stage.start_workers()
            where = stage.open_page(free(port))
            click.secho(f"\nOpen http://127.0.0.1:{where}/ (Ctrl-C ends it)\n", bold=True)
            stage.keep()
            ended = [server for server in stage.servers if not server.alive]
            logs = "\n".join(server.logs()[-2000:] for server in ended)
            click.secho(f"BROKEN: the provider or the page has ended:\n{logs}", fg="red", err=True)
    except KeyboardInterrupt:
        click.echo("\nstopped; nothing is left behind", err=True)
        return
    except (ServerMissing, NotReady, RuntimeError) as error:
        click.secho(f"BROKEN: the play could not run: {error}", fg="red", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main(standalone_mode=False)
