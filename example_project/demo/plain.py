"""The same summaries as tasks of plain Celery, for comparison."""

from __future__ import annotations

from typing import Any
from urllib.error import HTTPError

from example_project.celery import app
from example_project.tasks import ask_model


@app.task
def write_summary(document_id: int, model: str) -> dict[str, Any]:
    """Let the model summarise one document, for the person who pressed the button."""
    return ask_model(document_id, model, account="plain")


@app.task(
    autoretry_for=(HTTPError, ValueError), retry_backoff=True, retry_jitter=False, max_retries=8
)
def write_summary_overnight(document_id: int, model: str) -> dict[str, Any]:
    """Let the model summarise one document, some time this night; Celery retries after 1 s, 2 s,
    4 s, ….
    """
    return ask_model(document_id, model, account="plain")
