"""Private groups of Redis servers: a primary with a replica under Sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess
from tests.support.servers.local import free_port
from tests.support.servers.redis import RedisServer, find_redis_binary

PATIENCE = 30.0
"""Seconds to wait for the servers of a group to connect to each other."""
SLOTS = 16_384
MASTER = "leases"
"""The name of the primary for the Sentinels."""


class _SentinelServer(RedisServer):
    """A Sentinel that monitors a primary."""

    def __init__(self, watched: RedisServer, binary: Path | None) -> None:
        super().__init__(binary=binary)
        self._watched = watched

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        self._asked = port
        configuration = home / "sentinel.conf"
        configuration.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {home}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self._watched.port} 2\n"
            f"sentinel down-after-milliseconds {MASTER} 500\n"
            f"sentinel failover-timeout {MASTER} 3000\n"
        )
        binary = self._binary or find_redis_binary()
        return GuardedProcess(
            [binary, configuration, "--sentinel"], log=home / "server.log", homes=[home]
        )


class _Group:
    """Several servers that start and stop together; a context manager."""

    def __init__(self, binary: Path | None = None) -> None:
        self._binary = binary
        self._started: list[RedisServer] = []

    def _start_one(self, server: RedisServer) -> RedisServer:
        self._started.append(server.start())
        return server

    def stop(self) -> None:
        """End all servers and remove their data; may be called twice."""
        with contextlib.ExitStack() as stack:
            for server in self._started:
                stack.callback(server.stop)
            self._started = []

    def start(self) -> Self:
        """Start the servers and wait until they are connected to each other. Raises ServerMissing,
        NotReady and TimeoutError.
        """
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise
        return self

    def _begin(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisSentinels(_Group):
    """A primary, a replica, and three Sentinels, which start a failover half a second after the
    primary stops answering.

    ``servers`` are the primary and the replica, which change their roles with each failover.
    """

    def _begin(self) -> None:
        at_once = ("--repl-diskless-sync-delay", "0")
        first = self._start_one(RedisServer(binary=self._binary, options=at_once))
        following = ("--replicaof", "127.0.0.1", str(first.port), *at_once)
        second = self._start_one(RedisServer(binary=self._binary, options=following))
        self.servers = [first, second]
        wait_until(
            lambda: _text_reply(second, "INFO", "replication").find("master_link_status:up") > 0,
            PATIENCE,
            "a replica",
        )
        self.sentinels = [self._start_one(_SentinelServer(first, self._binary)) for _ in range(3)]
        for sentinel in self.sentinels:
            _shorten_periods(sentinel)
        wait_until(
            self._are_connected, PATIENCE, "the Sentinels to know each other and the replica"
        )

    @property
    def url(self) -> str:
        """``sentinel://…;sentinel://…/0?master_name=leases``."""
        hosts = ";".join(f"sentinel://127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"{hosts}/0?master_name={MASTER}"

    @property
    def primary(self) -> RedisServer:
        """The primary according to the first Sentinel."""
        with _client(self.sentinels[0]) as client:
            _, port = client.sentinel_get_master_addr_by_name(MASTER)
        return next(server for server in self.servers if server.port == port)

    def _are_connected(self) -> bool:
        for sentinel in self.sentinels:
            with _client(sentinel) as client:
                state = client.sentinel_master(MASTER)
                if (state["num-slaves"], state["num-other-sentinels"]) != (1, 2):
                    return False
                if any(
                    replica["master-link-status"] != "ok"
                    for replica in client.sentinel_slaves(MASTER)
                ):
                    return False
        return True


class RedisCluster(_Group):
    """Three primaries without replicas, each with a third of the slots. ``nodes`` has them in the
    order of their slots.

    If a node is down, only its own slots are unavailable; the others notice it after a second.
    """

    def _begin(self) -> None:
        self.nodes = [_ClusterNode(self._binary) for _ in range(3)]
        for number, node in enumerate(self.nodes):
            self._start_one(node)
            with _client(node) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                first, last = _slots_of(number, len(self.nodes))
                client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last + 1))
                if number:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        self.await_agreed()

    @property
    def url(self) -> str:
        """``redis+cluster://127.0.0.1:…,127.0.0.1:…``."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def node_of(self, key: str) -> RedisServer:
        """The node that had the slot of *key* when the cluster was created."""
        from redis.crc import key_slot

        slot = key_slot(key.encode())
        ranges = [_slots_of(number, len(self.nodes)) for number in range(len(self.nodes))]
        return next(
            node
            for node, (first, last) in zip(self.nodes, ranges, strict=True)
            if first <= slot <= last
        )

    def await_agreed(self) -> None:
        """Wait until each node is connected to all others, for example after a node was started.
        Raises TimeoutError.
        """
        wait_until(self._are_connected, PATIENCE, "the cluster")

    def _are_connected(self) -> bool:
        return all(
            f"cluster_state:ok\r\ncluster_slots_assigned:{SLOTS}" in info
            and "cluster_known_nodes:3" in info
            for info in (_text_reply(node, "CLUSTER", "INFO") for node in self.nodes)
        )


class _ClusterNode(RedisServer):
    """A node of a cluster."""

    def __init__(self, binary: Path | None) -> None:
        alone = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        super().__init__(binary=binary, options=(*alone, "--cluster-require-full-coverage", "no"))
        self._port = _port_below_a_free_one()


def _port_below_a_free_one() -> int:
    """A free port for a node. Its cluster bus uses the port that is higher by 10000, which must be
    free too.
    """
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", port + 10_000))
            return port


def _slots_of(number: int, count: int) -> tuple[int, int]:
    return number * SLOTS // count, (number + 1) * SLOTS // count - 1


def _shorten_periods(sentinel: RedisServer) -> None:
    """Shorten a Sentinel's periods of several seconds, if its version supports that.

    A Sentinel that was paused for two seconds enters TILT mode, in which it does nothing; here for
    one second instead of 30.
    """
    import redis

    often = {"INFO-PERIOD": 500, "PUBLISH-PERIOD": 300, "PING-PERIOD": 200}
    soon = {"TILT-PERIOD": 1000, "ELECTION-TIMEOUT": 2000}
    with _client(sentinel) as client, contextlib.suppress(redis.ResponseError):
        client.execute_command(
            "SENTINEL", "DEBUG", *(part for pair in (often | soon).items() for part in pair)
        )


@contextlib.contextmanager
def _client(server: RedisServer) -> Iterator[Any]:
    import redis

    with redis.Redis(
        host="127.0.0.1", port=server.port, socket_timeout=5, decode_responses=True
    ) as client:
        yield client


def _text_reply(server: RedisServer, *command: str) -> str:
    """The text that a server returns for a command."""
    import redis

    with redis.Redis(host="127.0.0.1", port=server.port, socket_timeout=5) as client:
        client.set_response_callback(command[0], lambda answer, **_: answer)
        return bytes(client.execute_command(*command)).decode()
