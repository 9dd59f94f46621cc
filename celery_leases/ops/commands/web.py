"""``celery leases web``: serve the board."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from celery_leases.cli.parameters import option
from celery_leases.cli.root import app_of, client_of, command

LOCAL = ("localhost", "127.0.0.1", "::1")
SHUTDOWN_TIMEOUT = 5
"""How many seconds requests may still take after the board was stopped."""
CONCURRENT_REQUESTS = 200


@command()
@option("--host", default="127.0.0.1", help="The address to listen on.")
@option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    help="The port to listen on; 0 takes a free one.",
)
@option(
    "--password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Ask for a name and a password. The file has one line name:password for each person.",
)
@option(
    "--authoriser",
    metavar="MODULE:FUNCTION",
    help="Call this function to find out which user sends a request.",
)
@option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="The public URL of the board behind a proxy, such as https://ops.example.com; may be "
    "repeated.",
)
def web(
    ctx: click.Context,
    *,
    host: str,
    port: int,
    password_file: Path | None,
    authoriser: str | None,
    origins: tuple[str, ...],
    **_: Any,
) -> None:
    """Serve the board: records and cooldown groups as web pages. Needs celery-leases[web].

    An address that other machines can reach needs --password-file or --authoriser.
    """
    try:
        import uvicorn

        from celery_leases.ops.board import Passwords, leases_board
        from celery_leases.ops.board.access import is_loopback, local_operator
    except ImportError:
        raise click.UsageError(
            "the board needs more packages: pip install 'celery-leases[web]'"
        ) from None
    if password_file is not None and authoriser is not None:
        raise click.UsageError("give --password-file or --authoriser, not both")
    if not is_loopback(host) and password_file is None and authoriser is None:
        raise click.UsageError(
            f"--host {host}: without a password, anyone who can connect could release and forget "
            "every key; give --password-file or --authoriser"
        )
    authorise: Any = local_operator
    if password_file is not None:
        authorise = Passwords(password_file)
    elif authoriser is not None:
        authorise = _imported(authoriser)
    app = app_of(ctx)
    client_of(ctx)  # report a wrong setting now, and import what the first page needs
    # DNS rebinding: without a password, only requests that name a local host are served.
    hosts = LOCAL if authorise is local_operator else None
    board = leases_board(app, authorise, origins=origins, hosts=hosts)
    log = logging.getLogger("celery_leases")
    if not log.handlers and not logging.getLogger().handlers:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("celery_leases.ops.board").setLevel(logging.INFO)
    uvicorn.run(
        board,
        host=host,
        port=port,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        limit_concurrency=CONCURRENT_REQUESTS,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
    )


def _imported(name: str) -> Any:
    """The function that ``module:function`` names."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{name}: {error}", param_hint="--authoriser") from None
