"""Changes of many keys, while they are made and afterwards."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from celery_leases.board.application import Answer, Asked, GoTo
from celery_leases.board.bulk_jobs import Job


def one(asked: Asked) -> Answer:
    """What became of a change so far."""
    return Answer("job.html", {"job": _job(asked, asked.query.get("number"))})


def stop(asked: Asked) -> GoTo:
    """End it after the key that is being changed."""
    job = _job(asked, asked.form.get("number"))
    job.stop()
    job.ended.wait(3.0)
    return GoTo(f"/jobs?number={job.number}")


def _job(asked: Asked, number: str) -> Job:
    job = asked.board.jobs.get(number)
    if job is None:
        raise HTTPException(
            404, "This process of the board knows no such change; the log says what became of it."
        )
    return job
