"""The connections of one worker to one server, which can be cut, refused, or held back."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Link:
    """A proxy for the port *target* of 127.0.0.1. While ``stalled`` it keeps what it receives;
    while ``refusing`` it accepts no connection.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.refusing = False
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Cut all connections; returns how many there were."""
        with self._lock:
            ends = list(self._open)
        for end in ends:
            _close(end)
        return len(ends) // 2

    def stall(self) -> None:
        """Hold all data back, as a network that loses packets."""
        self._flows.clear()

    def heal(self) -> None:
        """Forward again, and accept connections."""
        self.refusing = False
        self._flows.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing:
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as server,
        ):
            ends = {client, server}
            with self._lock:
                self._open |= ends
            back = threading.Thread(target=self._forward, args=(server, client), daemon=True)
            back.start()
            self._forward(client, server)
            back.join()
            with self._lock:
                self._open -= ends

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                to.sendall(data)
        _close(to)
        _close(source)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
