"""``celery leases exporter``: serve the metrics of all processes to Prometheus."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Final

import click

from celery_leases.cli.output import echo_line
from celery_leases.cli.parameters import DURATION, option
from celery_leases.cli.root import app_of, command
from celery_leases.text.durations import seconds
from celery_leases.worker.processes import METRICS_DIRECTORY

PORT: Final = 9808


@command()
@option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    help="Listen on this port; 0 takes any free one.",
)
@option(
    "--address",
    default="127.0.0.1",
    help="Listen on this address. There is no password: protect any address that others can reach.",
)
@option(
    "--count-every",
    type=DURATION,
    default="1m",
    help="Count the records for the gauges at most this often.",
)
@option(
    "--no-gauges", is_flag=True, help="Serve counters only: one exporter of an app serves gauges."
)
def exporter(
    ctx: click.Context, port: int, address: str, count_every: str, *, no_gauges: bool, **_: Any
) -> None:
    """Serve metrics to Prometheus, at /metrics, until the command is stopped.

    Gauges come from the records. Counters come from the files that the processes of this host write
    into the directory in PROMETHEUS_MULTIPROC_DIR: set it for them and for the exporter.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from celery_leases.ops.gauges import RecordGauges
        from celery_leases.ops.metrics import CountedEvents
    except ImportError:
        raise click.UsageError(
            "the exporter needs prometheus_client: pip install 'celery-leases[metrics]'"
        ) from None
    app = app_of(ctx)
    registry = CollectorRegistry()
    if not no_gauges:
        registry.register(RecordGauges(app, count_every=seconds(count_every)))
    if directory := os.environ.get(METRICS_DIRECTORY):
        registry.register(CountedEvents(directory))
    else:
        echo_line(f"No counters are served: {METRICS_DIRECTORY} is not set.", err=True)
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
