"""Does what the README says, with the packages of the interpreter that runs this file and a private
Redis: ``python tests/quickstart.py README.md``, in a folder where no checkout can be imported.
"""

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

PATIENCE = 60.0


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(what: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    """Until the log of the process contains this text."""
    until = time.monotonic() + PATIENCE
    while what not in log.read_text():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{what!r} is not in the log:\n{log.read_text()}")
        time.sleep(0.1)


def started(folder: Path, name: str, *command: str) -> "tuple[subprocess.Popen[bytes], Path]":
    """A program in the folder, and its log."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    return process, log


def ran(folder: Path, *args: str) -> str:
    """What the interpreter with these arguments prints; it must succeed."""
    command = (sys.executable, *args)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(readme: str, folder: Path) -> None:
    """Write the example, start a worker, call it twice, count the mails, and forget the key."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise SystemExit("the quickstart needs redis-server or valkey-server")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^    (celery .*|python .*)$", readme, re.MULTILINE)
    celery, calls, listed, forgotten = map(shlex.split, commands[:4])
    port = free_port()
    address = f"redis://127.0.0.1:{port}/"
    (folder / "billing.py").write_text(example.replace("redis://localhost/", address))
    running = []
    try:
        running.append(started(folder, "redis", server, "--port", str(port), "--save", ""))
        wait_for("Ready to accept", running[0][1], running[0][0])
        worker = (sys.executable, "-m", *celery, "--loglevel", "info")
        running.append(started(folder, "worker", *worker))
        wait_for(" ready.", running[1][1], running[1][0])
        answers = ran(folder, *calls[1:])
        ran(folder, "-m", *listed)
        ran(folder, "-m", *forgotten[: forgotten.index("#")])
        mails = running[1][1].read_text().count("mail: customer")
    finally:
        for process, _ in reversed(running):
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
    expected = "{'customer': 1842} {'customer': 1842}"
    if (answers.strip(), mails) != (expected, 1):
        raise SystemExit(f"{mails} mails, {answers}{running[1][1].read_text()}")
    names = ("celery-leases", "celery", "kombu", "redis", "sqlalchemy")
    print("one mail, two results:", *(f"{name} {metadata.version(name)}" for name in names))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(sys.argv[1]).read_text(), Path(made))
