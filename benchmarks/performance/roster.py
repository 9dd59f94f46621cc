"""The contenders: the rows of most tables."""

from dataclasses import dataclass

from benchmarks import environments


@dataclass(frozen=True)
class Contender:
    """One row: *name* of its module, *environment* with its requirements, *records* table."""

    name: str
    title: str
    environment: str
    distribution: str = ""
    records: str = ""
    on_celery: bool = True

    @property
    def heading(self) -> str:
        """Its title and version."""
        version = (
            environments.version(self.environment, self.distribution) if self.distribution else ""
        )
        return f"{self.title} {version}".strip()


PLAIN = Contender("plain", "plain Celery", "plain", "celery")
ONCE = Contender("once", "celery-once", "once", "celery-once")
SINGLETON = Contender("singleton", "celery-singleton", "singleton", "celery-singleton")
TIGHT = Contender("tight", "written by hand: Redis + PostgreSQL", "psycopg", records="job_record")
ROWS = Contender("rows", "written by hand: PostgreSQL", "psycopg", records="job_record")
DBOS = Contender("dbos", "DBOS", "dbos", "dbos", on_celery=False)
LEASES = Contender(
    "leases",
    "**celery_leases: Redis + PostgreSQL**",
    "leases_postgresql",
    records="celery_leases_records",
)
LEASES_DATABASE = Contender(
    "leases_database",
    "**celery_leases: database leases**",
    "leases_postgresql",
    records="celery_leases_records",
)

ALL = (PLAIN, ONCE, SINGLETON, ROWS, TIGHT, DBOS, LEASES_DATABASE, LEASES)
ON_CELERY = tuple(contender for contender in ALL if contender.on_celery)
OURS = (LEASES, LEASES_DATABASE)
EVERYTHING = {contender.name: contender for contender in ALL}
