"""Changes of many keys, made one after the other in a background thread.

A job counts the changes and writes a log line for each.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from celery_leases.errors import LeasesError
from celery_leases.ops.reports import Change
from celery_leases.status import LeaseStatus
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import NoticeLogger
from celery_leases.text.redaction import redact

logger = NoticeLogger(logging.getLogger("celery_leases.ops.board"))

MAX_RUNNING: Final = 4
MAX_JOBS: Final = 100
"""How many jobs, running or finished, are held in memory."""
REASONS_SHOWN: Final = 50
"""For how many unchanged keys the reason is listed."""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished part of a job: *count* keys, of which *changed* were changed.

    *line* is its log line; *why* names the unchanged keys and the reason, *next_step* says how the
    call of a changed key runs again.
    """

    line: str
    changed: int = 1
    count: int = 1
    why: str | None = None
    published: bool | None = None
    next_step: str | None = None


@dataclass
class Job:
    """A change of many keys: its progress and its result."""

    name: str
    number: str
    who: str
    total: int
    changed: int = 0
    unchanged: int = 0
    published: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)
    next_steps: Counter[str] = field(default_factory=Counter)
    problem: str | None = None
    stopped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self.ended.is_set()

    def stop(self) -> None:
        """End the job after the key that is being changed."""
        self.stopped = True


class TooManyJobs(Exception):
    """The maximal number of jobs is running."""


class Jobs:
    """The latest jobs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, name: str, who: str, total: int, steps: Iterable[Step]) -> Job:
        """Start a job that does *steps*; *name* describes it. Raises :class:`TooManyJobs`."""
        job = Job(name, secrets.token_urlsafe(12), who, total)
        with self._lock:
            if sum(not each.finished for each in self._jobs.values()) >= MAX_RUNNING:
                raise TooManyJobs
            finished = [number for number, each in self._jobs.items() if each.finished]
            for number in finished[: max(0, len(self._jobs) - MAX_JOBS + 1)]:
                del self._jobs[number]
            self._jobs[job.number] = job
        logger.info("%s asks: %s; %d", who, name, total)
        threading.Thread(
            target=self._run, args=(job, steps), name="celery_leases_board_job", daemon=True
        ).start()
        return job

    def get(self, number: str) -> Job | None:
        """The job with this number, or ``None``."""
        return self._jobs.get(number)

    def running(self) -> list[Job]:
        """The jobs that have not ended."""
        return [job for job in list(self._jobs.values()) if not job.finished]

    @staticmethod
    def _run(job: Job, steps: Iterable[Step]) -> None:
        try:
            for step in steps:
                _count(job, step)
                if job.stopped:
                    break
        except LeasesError as error:
            job.problem = redact(str(error))
        except Exception:
            logger.exception("%s: %s failed", job.who, job.name, code="board-error")
            job.problem = "It ended with an error, which is in the log of the board."
        finally:
            logger.info(
                "%s: %s: %d changed, %d unchanged%s",
                job.who,
                job.name,
                job.changed,
                job.unchanged,
                ", stopped" if job.stopped else f"; {job.problem}" if job.problem else "",
            )
            job.ended.set()


def _count(job: Job, step: Step) -> None:
    job.changed += step.changed
    job.unchanged += step.count - step.changed
    job.published += step.published is True
    job.refused += step.published is False
    if step.next_step is not None:
        job.next_steps[step.next_step] += 1
    if step.why is not None and len(job.reasons) < REASONS_SHOWN:
        job.reasons.append(step.why)
    if step.line:
        logger.info("%s: %s", job.who, step.line)


def steps_of(
    what: str,
    change: Callable[[Iterable[LeaseStatus]], Iterable[Change]],
    found: Iterable[LeaseStatus],
) -> Iterator[Step]:
    """The steps of a job that applies *change* to each key that was *found*."""
    seen: list[LeaseStatus] = []

    def each_found() -> Iterator[LeaseStatus]:
        for status in found:
            seen[:] = [status]
            yield status

    for made in change(each_found()):
        before = seen[0]
        was = f"{printable(before.stored_key or before.key)}, which was {before.state} at fence {before.fence}"
        if made.done:
            yield Step(f"{what} {was}", published=made.published, next_step=made.next_step)
        else:
            yield Step(f"unchanged: {was}", changed=0, why=printable(redact(made.why_of_key), 500))
