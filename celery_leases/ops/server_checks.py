"""Checks of the servers: the broker, the lease store and the records database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from celery import Celery

from celery_leases.attempt.process import Process
from celery_leases.errors import LeaseConfigurationError, LeasesError, StoreUnavailable
from celery_leases.ops.server_facts import ServerFacts, records_facts, redis_facts
from celery_leases.options import DATABASE
from celery_leases.settings import REDIS_SCHEMES
from celery_leases.worker.answering import BROKER_TIMEOUT
from celery_leases.worker.checks.settings import Finding, Severity

CLOCKS_APART: Final = 2.0
"""Seconds by which a clock may differ from that of this machine without a warning."""
SLOW: Final = 0.1
"""Seconds that a round trip may take without a warning."""
HOLDERS: Final = 1000
_ANSWERING: Final = {"records": "database of the records"}
_NTP: Final = "let all machines keep time by NTP"


class StoreChecks:
    """Examines the stores of *process* and the broker of its app. ``servers`` and ``findings``
    are the results so far.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.servers: list[ServerFacts] = []
        self.findings: list[Finding] = []
        self._identity = ""

    def run(self) -> None:
        """Examine the broker, the lease store and the records, each even if another one does not
        answer.
        """
        with self._part("broker", "broker-away", _shown_broker(self._process.app)):
            self._broker(self._process.app)
        leases = self._process.leases
        is_apart = self._process.settings.leases_url != DATABASE
        if is_apart:
            with self._part("lease store", "lease-store-away", leases.name):
                self._lease_store(leases)
        with self._part("records", "records-away", _shown_records(self._process)):
            self._records()
        all_answered = not any(server.trouble for server in self.servers)
        if is_apart and self._identity and all_answered:
            with suppress(StoreUnavailable):  # this user may not be allowed to SCAN
                self._other_database(leases, self._identity)

    def _records(self) -> None:
        from celery_leases.stores.database_write_check import check_writes

        records = self._process.records
        self._note(records_facts(records))
        if (least := records.database.dialect.too_old) is not None:
            self._error(
                "old-database",
                "the database is older than what the statements need",
                f"install {least} or later",
            )
        if self._refused("tables", records.check):
            return
        self._refused("rights", lambda: check_writes(records))
        self._identity = records.identity()

    def _other_database(self, leases: Any, identity: str) -> None:
        """Find leases of workers with another records database: two environments share a prefix."""
        from celery_leases.stores.redis.leases import RedisLeaseStore

        held = leases.live_holders(HOLDERS) if isinstance(leases, RedisLeaseStore) else ()
        others = [holder for holder in held if holder.database not in ("", identity)]
        if others:
            self._error(
                "shared-prefix",
                f"{len(others)} leases in {leases.name} belong to workers with another records "
                f"database, such as {others[0].host}: the calls of both wait for each other",
                "give each environment a leases_prefix, or a Redis database, of its own",
            )

    def _lease_store(self, leases: Any) -> None:
        from celery_leases.stores.redis.leases import RedisLeaseStore

        is_redis = isinstance(leases, RedisLeaseStore)
        for client in leases.servers() if is_redis else ():
            facts = redis_facts(client)
            version = f"Redis {facts.version}" if facts.version else None
            self._note(
                ServerFacts("lease store", leases.name, version, facts.latency, facts.clock_ahead)
            )
            if facts.too_old:
                self._error(
                    "old-redis",
                    f"the lease store {leases.name} is Redis {facts.version}, which lacks what the "
                    "scripts need",
                    "install Redis or Valkey 6.2 or later",
                )
            if leases.behind_sentinel and facts.alone:
                self._warn(
                    "lonely-primary",
                    f"the lease store {leases.name} has min-replicas-to-write 0: after a failover "
                    "an old primary that some workers still reach continues to grant and renew "
                    "leases, and two bodies of a key may run at once",
                    "write min-replicas-to-write 1 and min-replicas-max-lag 3 in redis.conf",
                )
        warnings: list[str | None] = []
        self._refused("lease-store", lambda: warnings.append(leases.check()))
        for warning in filter(None, warnings):
            problem, _, advice = warning.rpartition("; ")
            code = "evicting-lease-store" if is_redis else "lease-store-warning"
            self._warn(code, problem or advice, advice if problem else "")
        if not is_redis:
            self.servers.append(ServerFacts("lease store", leases.name))

    def _broker(self, app: Celery) -> None:
        with app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_TIMEOUT)
            if connection.transport_cls not in REDIS_SCHEMES:
                self.servers.append(ServerFacts("broker", _shown_broker(app)))
                return
            self._redis_broker(app, connection.default_channel.client)

    def _redis_broker(self, app: Celery, client: Any) -> None:

        facts, shown = redis_facts(client), _shown_broker(app)
        version = f"Redis {facts.version}" if facts.version else None
        self._note(ServerFacts("broker", shown, version, facts.latency, None))
        if (facts.policy or "").startswith("allkeys"):
            self._warn(
                "evicting-broker",
                f"the broker {shown} has maxmemory-policy {facts.policy}: when its memory is full "
                "it deletes queues with their messages",
                "write maxmemory-policy noeviction in redis.conf",
            )
        if facts.persistent is False:
            self._warn(
                "forgetful-broker",
                f"the broker {shown} writes nothing to its disk: a restart loses all messages, and "
                "calls that were published do not run",
                "write appendonly yes in redis.conf",
            )

    def _note(self, facts: ServerFacts) -> None:
        self.servers.append(facts)
        if facts.latency is not None and facts.latency > SLOW:
            self._warn(
                "slow-server",
                f"the {facts.part} {facts.address} answers after {facts.latency * 1000:.0f} ms: "
                "each run waits for that several times, and a renewal may come too late",
                "bring it nearer to the workers, or raise lease_ttl",
            )
        ahead = facts.clock_ahead or 0.0
        if abs(ahead) > CLOCKS_APART:
            where = "ahead of" if ahead > 0 else "behind"
            self._warn(
                "clocks-apart",
                f"the clock of the {facts.part} {facts.address} is {abs(ahead):.1f} s {where} that "
                "of this machine: callers get wrong times, and calls run again too early or "
                "too late",
                _NTP,
            )

    def _refused(self, code: str, step: Callable[[], object]) -> bool:
        """Call *step*; return whether it raised an error that a retry does not cure."""
        try:
            step()
        except StoreUnavailable:
            raise
        except LeasesError as error:
            problem, _, advice = str(error).rpartition("; ")
            self._error(code, problem or advice, advice if problem else "")
            return True
        return False

    @contextmanager
    def _part(self, part: str, code: str, address: str) -> Iterator[None]:
        try:
            yield
        except LeaseConfigurationError as error:
            self._error(code, str(error), "")
        except Exception as error:  # noqa: BLE001 - whatever a broker's or a store's client raises
            said = " ".join(str(error).split()) or type(error).__name__
            self.servers.append(ServerFacts(part, address, trouble=said))
            self._error(
                code,
                f"the {_ANSWERING.get(part, part)} does not answer: {said}",
                f"start it, or correct its URL: {address}",
            )

    def _error(self, code: str, problem: str, advice: str) -> None:
        self.findings.append(Finding(code, Severity.ERROR, problem, advice))

    def _warn(self, code: str, problem: str, advice: str) -> None:
        self.findings.append(Finding(code, Severity.WARNING, problem, advice))


def _shown_broker(app: Celery) -> str:
    found: str = app.connection_for_read().as_uri(include_password=False)
    return found


def _shown_records(process: Process) -> str:
    from celery_leases.stores.urls import display_database_url

    return display_database_url(process.records.database.engine.url)
