"""Private servers, three workers of three pools with connections of their own, and a caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.pool import NullPool

from tests.integration.deployments import Stage
from tests.soak.links import Link
from tests.support.servers import LocalServer, PostgresServer, RabbitServer, RedisServer
from tests.support.workers import LocalWorker, Pool

HOME = "tests.apps.proofs"
TTL = 3.0
POOLS: dict[Pool, int] = {"prefork": 4, "threads": 4, "gevent": 8}
"""The concurrency of each worker by its pool."""

AUDIT = (
    "CREATE TABLE proofs (name text)",
    "CREATE TABLE proofs_audit (id bigserial PRIMARY KEY, at double precision, old jsonb, new jsonb)",
    """CREATE FUNCTION proofs_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO proofs_audit (at, old, new) VALUES (
        extract(epoch FROM clock_timestamp()),
        CASE WHEN TG_OP = 'INSERT' THEN NULL ELSE to_jsonb(OLD) END,
        CASE WHEN TG_OP = 'DELETE' THEN NULL ELSE to_jsonb(NEW) END);
    RETURN NULL; END $$""",
    """CREATE TRIGGER proofs_note AFTER INSERT OR UPDATE OR DELETE ON celery_leases_records
    FOR EACH ROW EXECUTE FUNCTION proofs_note()""",
)
"""A trigger notes each version of each record, so that the package does not judge itself."""


@dataclass
class Deployment:
    """What a run has. ``links`` are by pool and server; that to Redis is one for all pools."""

    stage: Stage
    servers: dict[str, LocalServer]
    workers: dict[Pool, LocalWorker]
    links: dict[tuple[Pool, str], Link]
    database: Engine


@contextmanager
def deployed(leases: str) -> Iterator[Deployment]:
    """Start all of it; *leases* is ``redis`` or ``database``."""
    with ExitStack() as stack:
        results = stack.enter_context(RedisServer())
        servers: dict[str, LocalServer] = {
            "redis": stack.enter_context(RedisServer()),
            "postgres": stack.enter_context(PostgresServer()),
            "rabbit": stack.enter_context(RabbitServer()),
        }
        directory = Path(stack.enter_context(TemporaryDirectory()))
        postgres = servers["postgres"]
        assert isinstance(postgres, PostgresServer)
        urls = {
            "redis": results.url,
            "rabbit": servers["rabbit"].url,
            "postgres": postgres.new_database(),
        }
        env = {"TTL": f"{TTL:g}", "VISIBILITY": "3600", "PREFETCH": "4", "SETTLE_TIMEOUT": "20"}
        own = {"LEASES_URL": servers["redis"].url} if leases == "redis" else {}
        stage = Stage(("rabbit", leases, "postgres"), urls, directory, home=HOME, env=env | own)
        stack.callback(stage.close)
        stage.app.conf.broker_transport_options |= {"confirm_publish": True}
        database = create_engine(urls["postgres"], poolclass=NullPool)
        with database.begin() as connection:
            for statement in AUDIT:
                connection.execute(text(statement))
        workers, links = {}, {}
        # A lease store is known by its URL, so all workers have one connection to it in common.
        shared = stack.enter_context(Link(servers["redis"].port))
        for pool, concurrency in POOLS.items():
            through = dict(stage.env)
            for name, server in servers.items():
                link = shared if name == "redis" else stack.enter_context(Link(server.port))
                links[pool, name] = link
                for variable in ("CELERY_BROKER_URL", "LEASES_URL", "LEASES_DATABASE_URL"):
                    port, moved = f"127.0.0.1:{server.port}", f"127.0.0.1:{link.port}"
                    through[variable] = through[variable].replace(port, moved)
            worker = stage.new_worker(pool=pool, concurrency=concurrency, env=through)
            stack.callback(worker.teardown)
            workers[pool] = worker.launch()
        for worker in workers.values():
            worker.wait_ready(120)
        yield Deployment(stage, servers, workers, links, database)
