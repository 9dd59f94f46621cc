"""TCP proxies: one cuts a connection at one statement, either before it or before its reply; the
other holds all data back for a while, as a network that loses packets.
"""

import contextlib
import socket
import threading
from typing import Self


class CuttingProxy:
    """Forwards connections to the port *target* of 127.0.0.1, which new connections read;
    ``cut(pattern)`` arms it for the next match.

    ``was_cut`` is set once it has cut; from then on it refuses connections while ``refusing``.
    While ``silent`` it accepts all data and forwards none, as a frozen server does.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._pattern: bytes | None = None
        self._before = False
        self.refusing = False
        self.silent = False
        self._lock = threading.Lock()
        self.was_cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, pattern: bytes, *, before: bool = False) -> None:
        """Cut at the next request with *pattern*: after the server has executed it, or *before*."""
        self.was_cut.clear()
        self._before = before
        self._pattern = pattern

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing and self.was_cut.is_set():
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed = threading.Event()
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as server,
        ):
            back = threading.Thread(target=self._answer, args=(server, client, doomed), daemon=True)
            back.start()
            while data := client.recv(65536):
                if self.silent:
                    continue
                if self._matches(data):
                    doomed.set()
                    if self._before:
                        self.was_cut.set()
                        break
                server.sendall(data)
            if self._before or not doomed.is_set():
                _close(server)
            back.join()
        _close(client)

    def _matches(self, data: bytes) -> bool:
        with self._lock:
            if self._pattern is None or self._pattern not in data:
                return False
            self._pattern = None
            return True

    def _answer(
        self, server: socket.socket, client: socket.socket, doomed: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if doomed.is_set():
                    self.was_cut.set()
                    break
                if self.silent:
                    continue
                client.sendall(data)
        _close(client)
        _close(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StallingProxy:
    """Forwards connections to the port *target* of 127.0.0.1. Between ``stall()`` and ``resume()``
    it keeps what it receives, and forwards it later.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.stall, self.resume = self._flows.clear, self._flows.set
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                to.sendall(data)
        _close(to)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._listener.close()


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
