"""A web process of the demo: press the button for some documents, and note the ids of the calls in the journal.

``python -m example_project.button web-1 example_project.tasks.write_summary 20 quill 1842`` presses it 20 times. It
imports no task.
"""

from __future__ import annotations

import sys
import time

from example_project import app, journal

PAUSE = 0.05
"""Seconds between two presses; a hurried finger."""


def press(task: str, times: int, model: str, documents: list[int]) -> list[tuple[str, str]]:
    """Publish *times* calls for each document; key and id of each."""
    calls = []
    for _ in range(times):
        for document in documents:
            call = app.send_task(task, kwargs={"document_id": document, "model": model})
            calls.append((f"document:{document}", call.id))
        time.sleep(PAUSE)
    return calls


def main(web: str, task: str, times: str, model: str, *documents: str) -> None:
    """Press, and note when and under which ids."""
    began = time.monotonic()
    calls = press(task, int(times), model, [int(document) for document in documents])
    journal.write("Asked", t=began, worker=web, how=task.removeprefix("example_project."), key=calls[0][0], calls=calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
