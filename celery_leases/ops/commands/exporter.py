"""``celery leases exporter``: serve the metrics of all processes to Prometheus."""

from __future__ import annotations

import signal
import threading
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import echo_line
from celery_leases.cli.parameters import DURATION
from celery_leases.cli.root import app_of, leases
from celery_leases.text.durations import seconds
from celery_leases.worker.app_settings import settings_of

PORT: Final = 9808


@leases.command(cls=CeleryCommand)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    help="Listen on this port; 0 takes any free one.",
)
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address. There is no password: protect any address that others can reach.",
)
@click.option(
    "--count-every",
    type=DURATION,
    default="1m",
    show_default=True,
    help="Count the records for the gauges at most this often.",
)
@click.pass_context
@handle_preload_options
def exporter(ctx: click.Context, port: int, address: str, count_every: str, **_: Any) -> None:
    """Serve the metrics of all processes to Prometheus, at /metrics, until the command is stopped.

    Run one exporter for each app. Counters need leases_metrics = True in the app's settings.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from celery_leases.ops.prometheus import LeaseCollector
    except ImportError:
        raise click.UsageError(
            "the exporter needs prometheus_client: pip install 'celery-leases[metrics]'"
        ) from None
    app = app_of(ctx)
    if not settings_of(app).metrics:
        echo_line(
            "Only gauges are served: counters need leases_metrics = True in the app's settings.",
            err=True,
        )
    registry = CollectorRegistry()
    registry.register(LeaseCollector(app, count_every=seconds(count_every)))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise click.ClickException(f"{address}:{port}: {error.strerror or error}") from None
    echo_line(f"http://{address}:{server.server_port}/metrics", err=True)
    stopped.wait()
    server.shutdown()
    thread.join()
