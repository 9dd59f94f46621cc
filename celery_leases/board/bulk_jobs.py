"""Changes of many keys: made in a thread of their own, one after the other, with a count of what is
done, and a line in the log for each.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from celery_leases.client import Change, LeaseStatus
from celery_leases.common.redaction import redact
from celery_leases.common.texts import printable
from celery_leases.errors import LeasesError

logger = logging.getLogger("celery_leases.board")

RUNNING_AT_ONCE: Final = 4
KEPT: Final = 100
TOLD: Final = 50
"""At most so many keys that were left alone are listed one by one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One part of a job that is done: *count* keys, of which *changed* were changed.

    *line* is what the log says of it, *why* what was left alone and for which reason.
    """

    line: str
    changed: int = 1
    count: int = 1
    why: str | None = None
    published: bool | None = None


@dataclass
class Job:
    """What became of a change so far."""

    name: str
    number: str
    who: str
    total: int
    changed: int = 0
    left: int = 0
    published: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)
    problem: str | None = None
    stopped: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self.ended.is_set()

    def stop(self) -> None:
        """End it after the key that is being changed."""
        self.stopped = True


class TooManyJobs(Exception):
    """As many jobs run as may."""


class Jobs:
    """The jobs of this process, the latest of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, name: str, who: str, total: int, steps: Iterable[Step]) -> Job:
        """Begin to take *steps*; *name* says what they do. Raises :class:`TooManyJobs`."""
        job = Job(name, secrets.token_urlsafe(12), who, total)
        with self._lock:
            if sum(not each.over for each in self._jobs.values()) >= RUNNING_AT_ONCE:
                raise TooManyJobs
            over = [number for number, each in self._jobs.items() if each.over]
            for number in over[: max(0, len(self._jobs) - KEPT + 1)]:
                del self._jobs[number]
            self._jobs[job.number] = job
        logger.info("%s asks: %s; %d", who, name, total)
        threading.Thread(
            target=self._run, args=(job, steps), name="celery_leases_board_job", daemon=True
        ).start()
        return job

    def get(self, number: str) -> Job | None:
        """The job with this number."""
        return self._jobs.get(number)

    def running(self) -> list[Job]:
        """Those that are not over."""
        return [job for job in list(self._jobs.values()) if not job.over]

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
            logger.exception("%s: %s", job.who, job.name)
            job.problem = "It ended with an error; the log of the board has it."
        finally:
            logger.info(
                "%s: %s: %d changed, %d unchanged%s",
                job.who,
                job.name,
                job.changed,
                job.left,
                ", stopped" if job.stopped else f"; {job.problem}" if job.problem else "",
            )
            job.ended.set()


def _count(job: Job, step: Step) -> None:
    job.changed += step.changed
    job.left += step.count - step.changed
    job.published += step.published is True
    job.refused += step.published is False
    if step.why is not None and len(job.reasons) < TOLD:
        job.reasons.append(step.why)
    if step.line:
        logger.info("%s: %s", job.who, step.line)


def steps_of(
    what: str,
    change: Callable[[Iterable[LeaseStatus]], Iterable[Change]],
    found: Iterable[LeaseStatus],
) -> Iterator[Step]:
    """What *change* does to each key that was *found*, as steps."""
    seen: list[LeaseStatus] = []

    def each_found() -> Iterator[LeaseStatus]:
        for status in found:
            seen[:] = [status]
            yield status

    for made in change(each_found()):
        before = seen[0]
        key = printable(before.stored_key or before.key)
        was = f"{key}, which was {before.state} at fence {before.fence}"
        if made.done:
            yield Step(f"{what} {was}", published=made.published)
        else:
            why = printable(redact(made.why or ""), 500)
            told = why if before.key in why else f"{key}: {why}"
            yield Step(f"left alone: {was}", changed=0, why=told)
