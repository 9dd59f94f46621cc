"""What a worker of the play can be told by remote control: to die."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.worker.control import control_command


@control_command()
def die(_state: Any) -> None:
    """Die at once, as a worker that the kernel kills for its memory does."""
    os.kill(os.getpid(), signal.SIGKILL)
