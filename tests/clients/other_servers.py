"""Misbehaving servers that do not speak HTTP: mail, Redis and gRPC, each a context manager factory
that gives a URL.
"""

import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.clients.servers import Server, short_patience

Conversation = Callable[[socketserver.StreamRequestHandler], None]


class _LineServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False
    block_on_close = True

    def handle_error(self, *_: Any) -> None:
        """A client that gave up is what many cases want."""


@contextmanager
def _talking(scheme: str, conversation: Conversation) -> Iterator[str]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = 10.0

        def handle(self) -> None:
            conversation(self)

    with _LineServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def mail_server(**said: str | None) -> Server:
    """A mail server with given replies to commands (``RCPT="550 no such user"``).

    ``None`` closes the connection. Other commands succeed. ``CONNECT`` is the greeting, and
    ``CONTENT`` the reply to the mail itself.
    """
    usual = {
        "CONNECT": "220 ready",
        "EHLO": "250-here\r\n250 AUTH PLAIN",
        "AUTH": "235 welcome",
        "DATA": "354 go on",
        "QUIT": "221 bye",
    }
    answers: Mapping[str, str | None] = {**usual, **said}

    def conversation(client: socketserver.StreamRequestHandler) -> None:
        command = "CONNECT"
        while (answer := answers.get(command, "250 fine")) is not None:
            client.wfile.write(f"{answer}\r\n".encode())
            if answer.startswith("354"):
                while client.rfile.readline() not in {b".\r\n", b""}:
                    pass
                command = "CONTENT"
            elif line := client.rfile.readline():
                command = line.split()[0].decode().upper()
            else:
                return

    return lambda: _talking("smtp", conversation)


def redis_server(answer: str) -> Server:
    """A Redis that answers the greetings of a client and then every command with one error."""

    def conversation(client: socketserver.StreamRequestHandler) -> None:
        while header := client.rfile.readline():
            parts = []
            for _ in range(int(header[1:])):
                length = int(client.rfile.readline()[1:])
                parts.append(client.rfile.read(length + 2)[:-2])
            greeting = parts[0].upper() in {b"CLIENT", b"SELECT"}
            client.wfile.write(b"+OK\r\n" if greeting else f"-{answer}\r\n".encode())

    return lambda: _talking("redis", conversation)


def grpc_server(behave: Callable[[Any], None]) -> Server:
    """A gRPC server whose every method is *behave*, which aborts the context it gets."""

    @contextmanager
    def running() -> Iterator[str]:
        import grpc

        class Everything(grpc.GenericRpcHandler):
            def service(self, _: Any) -> Any:
                return grpc.unary_unary_rpc_method_handler(lambda _, context: behave(context))

        with ThreadPoolExecutor(1) as threads:
            server = grpc.server(threads, handlers=[Everything()])
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            try:
                yield f"127.0.0.1:{port}"
            finally:
                server.stop(None).wait()

    return running


def grpc_aborts(code: str, details: str = "no", *, retry_after: float | None = None) -> Server:
    """Abort every call with a code, and with ``RetryInfo`` when there is something to wait for."""

    def behave(context: Any) -> None:
        import grpc
        from google.protobuf import any_pb2, duration_pb2
        from google.rpc import error_details_pb2, status_pb2
        from grpc_status import rpc_status

        number = grpc.StatusCode[code].value[0]
        more = []
        if retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(retry_after * 1000))
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
            more.append(packed)
        context.abort_with_status(
            rpc_status.to_status(status_pb2.Status(code=number, message=details, details=more))
        )

    return grpc_server(behave)


@contextmanager
def grpc_hangs() -> Iterator[str]:
    """Take every call and answer none before the client has given up."""

    def behave(context: Any) -> None:
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(10)

    with short_patience(), grpc_server(behave)() as target:
        yield target
