"""A TCP proxy that cuts a connection at one statement, before it arrives or instead of passing its
reply on.
"""

import contextlib
import socket
import threading
from typing import Self


class CuttingProxy:
    """Forwards connections of 127.0.0.1 to a port there. ``cut(pattern)`` arms it for the next
    matching request.

    ``bitten`` is set once it has cut; from then on it refuses everybody while ``refusing``. While
    ``silent`` it takes everything and passes nothing on, so that a server that TCP finds alive
    never answers.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._pattern: bytes | None = None
        self._before = False
        self.refusing = False
        self.silent = False
        self._lock = threading.Lock()
        self.bitten = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, pattern: bytes, *, before: bool = False) -> None:
        """Cut at the next request with *pattern*: after the server has carried it out, or *before*
        it arrives.
        """
        self.bitten.clear()
        self._before = before
        self._pattern = pattern

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing and self.bitten.is_set():
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed = threading.Event()
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target)) as server,
        ):
            back = threading.Thread(target=self._answer, args=(server, client, doomed), daemon=True)
            back.start()
            while data := client.recv(65536):
                if self.silent:
                    continue
                if self._matches(data):
                    doomed.set()
                    if self._before:
                        self.bitten.set()
                        break
                server.sendall(data)
            if self._before or not doomed.is_set():
                _shut(server)
            back.join()
        _shut(client)

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
                    self.bitten.set()
                    break
                if self.silent:
                    continue
                client.sendall(data)
        _shut(client)
        _shut(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
