"""A proxy for one server that numbers the requests of a delivery, and cuts a connection at one."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Self

from tests.faults.requests import READERS

LAST_WORDS = 0.3
"""Seconds for which a server may answer a request after which the connection is cut: some requests
have no reply.
"""
QUIET = 0.4
LONGEST_WAIT = 5.0


@dataclass(frozen=True)
class Point:
    """The request of a delivery at which a connection is cut: the *number*-th with this label."""

    server: str
    label: str
    number: int
    before: bool = False

    def __str__(self) -> str:
        when = "before" if self.before else "after"
        times = f", {self.number}" if self.number > 1 else ""
        return f"{when} {self.server}: {self.label}{times}"


class Wire:
    """What all proxies of a run have in common: the requests they have seen, and where to cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._point: Point | None = None
        self._counts_now = self._met = False
        self._last = 0.0
        self.seen: list[Point] = []
        self.was_cut = threading.Event()

    def begin(self, point: Point | None = None) -> None:
        """Count from now on, and cut at *point*."""
        with self._lock:
            self._counts.clear()
            self.seen = []
            self._point, self._counts_now = point, True
            self._met = False
            self.was_cut.clear()

    def wait_until_quiet(self) -> None:
        """Return once no request has come for a moment: acknowledgements follow the result."""
        until = time.monotonic() + LONGEST_WAIT
        while time.monotonic() < min(until, self._last + QUIET):
            time.sleep(QUIET / 5)

    def end(self) -> None:
        """Count and cut no more."""
        with self._lock:
            self._point, self._counts_now = None, False

    @property
    def has_met(self) -> bool:
        """Whether the request has come at which a connection is cut."""
        with self._lock:
            return self._met

    def meets(self, server: str, label: str) -> Point | None:
        """Count a request; returns the point if the connection is to be cut there."""
        with self._lock:
            if not self._counts_now:
                return None
            self._last = time.monotonic()
            self._counts[server, label] += 1
            here = Point(server, label, self._counts[server, label])
            self.seen.append(here)
            point = self._point
            if point is None or (point.server, point.label, point.number) != (
                here.server,
                here.label,
                here.number,
            ):
                return None
            self._point, self._met = None, True
            return point


class NumberingProxy:
    """Forwards connections to the port *target* of 127.0.0.1, on which a server of *kind* listens;
    *server* is its name in the points.
    """

    def __init__(self, wire: Wire, server: str, kind: str, target: int) -> None:
        self._wire, self._server, self._kind = wire, server, kind
        self.target = target
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def cut_all(self) -> None:
        """Cut all connections."""
        for end in list(self._open):
            _close(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed = threading.Event()
        with contextlib.suppress(OSError), client:
            server = socket.create_connection(("127.0.0.1", self.target))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with server:
                self._open |= {client, server}
                back = threading.Thread(
                    target=self._answer, args=(server, client, doomed), daemon=True
                )
                back.start()
                self._forward(client, server, doomed)
                back.join(LAST_WORDS if doomed.is_set() else None)
                _close(server)
                _close(client)
                if doomed.is_set():
                    self._wire.was_cut.set()
                back.join()
                self._open -= {client, server}

    def _forward(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        """Forward requests until the client ends, or a cut is made."""
        reader = READERS[self._kind]()
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                for request in reader.read(data):
                    point = self._wire.meets(self._server, request.label) if request.label else None
                    if point is not None:
                        doomed.set()
                        if not point.before:
                            server.sendall(request.data)
                        return
                    server.sendall(request.data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if doomed.is_set():
                    return
                client.sendall(data)
        if not doomed.is_set():
            _close(client)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
