"""The page of a change of many keys, with its progress and its result."""

from __future__ import annotations

from starlette.exceptions import HTTPException

from celery_leases.ops.board.application import HtmlPage, Redirect, ViewRequest
from celery_leases.ops.board.bulk_jobs import Job


def one(request: ViewRequest) -> HtmlPage:
    """The progress or the result of one change."""
    return HtmlPage("job.html", {"job": _job(request, request.query.get("number"))})


def stop(request: ViewRequest) -> Redirect:
    """Stop the change after the key that is being changed."""
    job = _job(request, request.form.get("number"))
    job.stop()
    job.ended.wait(3.0)
    return Redirect(f"/jobs?number={job.number}")


def _job(request: ViewRequest, number: str) -> Job:
    job = request.board.jobs.get(number)
    if job is None:
        raise HTTPException(
            404, "This process of the board does not have this change; its result is in the log."
        )
    return job
