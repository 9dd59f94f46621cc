"""The packages that the cases are run with: the columns of the table."""

from dataclasses import dataclass

from benchmarks import environments


@dataclass(frozen=True)
class Package:
    """A column; ``name`` is the name of its adapter and of its requirements file."""

    name: str
    title: str

    @property
    def version(self) -> str:
        """The pinned version; empty for the working tree."""
        return environments.version(self.name, "celery" if self.name == "plain" else self.title)


PACKAGES = (
    Package("plain", "Celery alone"),
    Package("once", "celery-once"),
    Package("singleton", "celery-singleton"),
    Package("heimdall", "celery-heimdall"),
    Package("once_task", "celery-once-task"),
    Package("leases", "celery_leases"),
)
"""The columns, in their order."""
