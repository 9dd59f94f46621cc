"""Which URLs a Redis lease store accepts, how it reads them, and which errors it raises for
others.
"""

import ssl
from typing import Any

import pytest
import redis

from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.redis.leases import RedisLeaseStore

SECRET = "s3cret-w0rd"


def made_of(url: str, **options: Any) -> dict[str, Any]:
    """The parameters of a connection, without those that are the same for all."""
    pool = RedisLeaseStore.from_url(url, timeout=1.5, options=options)._client.connection_pool
    given = dict(pool.connection_kwargs)
    assert given.pop("socket_timeout") == 1.5
    assert given.pop("socket_connect_timeout", 1.5) == 1.5
    assert given.pop("retry")._retries == 0
    compared = (
        "host",
        "port",
        "db",
        "path",
        "username",
        "password",
        "credential_provider",
        "client_name",
    )
    found = {
        name: given[name]
        for name in given
        if name in compared or name.startswith(("ssl_", "socket_"))
    }
    found["tls"] = issubclass(pool.connection_class, redis.SSLConnection)
    assert issubclass(pool.connection_class, redis.UnixDomainSocketConnection) is ("path" in found)
    return found


@pytest.mark.parametrize("scheme", ["redis", "valkey", "rediss", "valkeys"])
def test_servers_are_found_over_tcp(scheme: str) -> None:
    tls = scheme.endswith("ss") or scheme == "valkeys"
    assert made_of(f"{scheme}://") == {"host": "127.0.0.1", "port": 6379, "db": 0, "tls": tls}
    url = f"{scheme}://me:{SECRET}%40@Example.org:7000/3"
    expected = {
        "host": "example.org",
        "port": 7000,
        "db": 3,
        "username": "me",
        "password": f"{SECRET}@",
        "tls": tls,
    }
    assert made_of(url) == expected


@pytest.mark.parametrize("scheme", ["unix", "socket", "redis+socket", "valkey+socket"])
@pytest.mark.parametrize("query", ["db", "virtual_host"])
def test_servers_are_found_over_sockets(scheme: str, query: str) -> None:
    expected = {"path": "/run/redis.sock", "db": 3, "password": SECRET, "tls": False}
    assert (
        made_of(f"{scheme}://:{SECRET}@/run/redis.sock?{query}=3", socket_keepalive=True)
        == expected
    )
    assert made_of(f"{scheme}:///run/redis.sock") == {
        "path": "/run/redis.sock",
        "db": 0,
        "tls": False,
    }


def test_the_query_may_name_the_database_and_the_login() -> None:
    found = made_of(f"redis://h/0?db=5&username=me&password={SECRET}")
    assert (found["db"], found["username"], found["password"]) == (5, "me", SECRET)
    assert made_of("redis://h?virtual_host=4")["db"] == 4


def test_tls_is_configured_by_url_or_options() -> None:
    found = made_of(
        "rediss://h?ssl_cert_reqs=CERT_NONE&ssl_ca_certs=/ca.pem&ssl_check_hostname=false"
    )
    assert (found["ssl_cert_reqs"], found["ssl_ca_certs"]) == (ssl.CERT_NONE, "/ca.pem")
    assert found["ssl_check_hostname"] is False
    assert made_of("redis://h", ssl=True)["tls"]
    assert not made_of("redis://h", ssl=False)["tls"]
    found = made_of(
        "redis://h", ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_keyfile": "/key.pem"}
    )
    assert (found["tls"], found["ssl_keyfile"]) == (True, "/key.pem")


def test_transport_options_are_followed_where_they_matter() -> None:
    """But none that delays a call or retries it."""
    given = {
        "global_keyprefix": "app:",
        "socket_keepalive": True,
        "client_name": "worker",
        "socket_timeout": 99,
        "socket_connect_timeout": 99,
        "retry_on_timeout": True,
        "max_connections": 1,
        "visibility_timeout": 60,
    }
    found = made_of("redis://h/0", **given)
    assert (found["socket_keepalive"], found["client_name"]) == (True, "worker")
    store = RedisLeaseStore.from_url("redis://h/0", prefix="p", options=given)
    assert store.prefix == "app:p"
    assert store._client.connection_pool.max_connections > 10_000


def test_a_credential_provider_replaces_the_password() -> None:

    class Provider(redis.CredentialProvider):
        def get_credentials(self) -> tuple[str]:
            return (SECRET,)

    provider = Provider()
    found = made_of(f"redis://:{SECRET}@h", credential_provider=provider)
    assert found["credential_provider"] is provider
    assert "password" not in found
    named = made_of(
        "redis://h?credential_provider=redis.credentials:UsernamePasswordCredentialProvider"
    )
    assert isinstance(named["credential_provider"], redis.UsernamePasswordCredentialProvider)
    with pytest.raises(LeaseConfigurationError, match="credential_provider"):
        made_of("redis://h?credential_provider=no.such:Thing")


def test_all_spellings_of_one_server_have_one_name() -> None:

    def name(url: str, prefix: str = "p", **options: Any) -> str:
        return RedisLeaseStore.from_url(url, prefix=prefix, options=options).name

    spellings = [
        "redis://localhost",
        "redis://127.0.0.1:6379/0",
        "redis://[::1]/",
        f"valkey://u:{SECRET}@localhost",
    ]
    assert {name(url) for url in spellings} == {"redis:127.0.0.1:6379/0/p"}
    assert name("redis://Example.org/2") == "redis:example.org:6379/2/p"
    assert name("redis://[fe80::1]:7/2") == "redis:[fe80::1]:7/2/p"
    assert name(f"unix://:{SECRET}@/run/r.sock?db=2") == "redis:/run/r.sock/2/p"
    assert name("redis://h", global_keyprefix="app:") == "redis:h:6379/0/app:p"
    others = ["redis://a", "redis://b", "redis://a/1", "redis://a:1", "unix:///a"]
    assert len({name(url) for url in others} | {name("redis://a", "q")}) == 6


@pytest.mark.parametrize(
    "url",
    [
        f"sentinel://me:{SECRET}@a:26379/0",
        f"sentinel://:{SECRET}@a:26379;sentinel://:{SECRET}@b:26379",
        f"sentinel://:{SECRET}@a:26379;sentinel://:{SECRET}2@b:26379?master_name=m",
        f"sentinel://:{SECRET}@a/1;sentinel://:{SECRET}@b/2?master_name=m",
        f"sentinel://:{SECRET}@a;redis://:{SECRET}@b?master_name=m",
        f"sentinel://:{SECRET}@a?master_name=m&min_other_sentinels=few",
        f"redis+cluster://:{SECRET}@a,b:7000/1",
        f"redis+cluster://:{SECRET}@a,b:seven",
        f"unix+cluster://:{SECRET}@/run/a",
        f"redis://:{SECRET}@a;redis://:{SECRET}@b",
        f"amqp://guest:{SECRET}@rabbit//",
        f"redis://:{SECRET}@h:port/0",
        f"redis://:{SECRET}@h/name",
        f"redis://:a@{SECRET}@h/name",
        f"redis://:{SECRET}/x?y@h/name",
        f"redis://h/name?password={SECRET}",
        f"rediss://h/0?ssl_cert_reqs=maybe&password={SECRET}",
        f":{SECRET}@h:6379",
        "localhost:6379",
        "",
    ],
)
def test_any_other_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(LeaseConfigurationError) as caught:
        RedisLeaseStore.from_url(url)
    assert SECRET not in str(caught.value)
    assert 'leases_url = "database"' in str(caught.value)
    assert "redis://" in str(caught.value)


def test_sentinels_are_listed_as_for_kombu() -> None:
    url = f"sentinel://me:{SECRET}@A;sentinel://b:7000/2"
    kwargs = {"password": "other", "ssl": True, "socket_timeout": 99, "retry_on_timeout": True}
    options = {
        "master_name": "m",
        "min_other_sentinels": 1,
        "sentinel_kwargs": kwargs,
        "ssl": {"ssl_ca_certs": "/ca"},
    }
    for store in (
        RedisLeaseStore.from_url(url, timeout=3.0, options=options),
        RedisLeaseStore.from_url(
            f"{url}?master_name=m&min_other_sentinels=1&sentinel_password=other&ssl_ca_certs=/ca",
            timeout=3.0,
            options={"sentinel_kwargs": {"ssl": True}},
        ),
    ):
        pool = store._client.connection_pool
        assert pool.service_name == "m"
        assert pool.is_master
        assert issubclass(pool.connection_class, redis.SSLConnection)
        given = pool.connection_kwargs
        assert (given["username"], given["password"], given["db"], given["ssl_ca_certs"]) == (
            "me",
            SECRET,
            2,
            "/ca",
        )
        assert given["socket_timeout"] == given["socket_connect_timeout"] == 3.0
        assert given["retry"]._retries == 0
        manager = pool.sentinel_manager
        assert manager.min_other_sentinels == 1
        asked = [sentinel.connection_pool for sentinel in manager.sentinels]
        assert [
            (one.connection_kwargs["host"], one.connection_kwargs["port"]) for one in asked
        ] == [("a", 26379), ("b", 7000)]
        for one in asked:
            assert issubclass(one.connection_class, redis.SSLConnection)
            assert one.connection_kwargs["password"] == "other"
            assert (
                one.connection_kwargs["socket_timeout"]
                == one.connection_kwargs["socket_connect_timeout"]
                == 1.5
            )
            assert one.connection_kwargs["retry"]._retries == 0


def test_a_store_behind_sentinels_has_the_name_of_its_primary() -> None:
    spellings = [
        "sentinel://a;sentinel://b/2?master_name=m",
        f"sentinel://:{SECRET}@c:7/2?master_name=m",
    ]
    names = {RedisLeaseStore.from_url(url, prefix="p").name for url in spellings}
    assert names == {"redis-sentinel:m/2/p"}


@pytest.mark.parametrize(
    "scheme", ["redis+cluster", "valkey+cluster", "rediss+cluster", "valkeys+cluster"]
)
def test_a_cluster_is_named_by_some_of_its_nodes(scheme: str) -> None:
    spelled = (f"me:{SECRET}@b:7000,a", f"me:{SECRET}@a;{scheme}://me:{SECRET}@b:7000")
    for rest in spelled:
        store = RedisLeaseStore.from_url(f"{scheme}://{rest}", prefix="p", timeout=1.5)
        assert store.name == "redis-cluster:a:6379,b:7000/p"
        pool = store._client._client(("n", 7001)).connection_pool
        assert issubclass(pool.connection_class, redis.SSLConnection) is scheme.startswith(
            ("rediss", "valkeys")
        )
        given = pool.connection_kwargs
        assert (given["host"], given["port"], given["username"], given["password"]) == (
            "n",
            7001,
            "me",
            SECRET,
        )
        assert given["socket_timeout"] == given["socket_connect_timeout"] == 1.5
        assert given["retry"]._retries == 0


def test_no_password_shows_in_a_representation() -> None:
    store = RedisLeaseStore.from_url(f"redis://me:{SECRET}@h:1/2")
    assert SECRET not in repr(store) + repr(vars(store)["_reopen"]) + store.name


def test_the_name_of_a_store_with_many_nodes_fits_into_its_column() -> None:
    nodes = [f"redis-node-{number}.cache.example.com:6379" for number in range(24)]

    def name(nodes: list[str], prefix: str = "celery_leases") -> str:
        url = f"redis+cluster://{','.join(nodes)}"
        return RedisLeaseStore.from_url(url, prefix=prefix).name

    names = {name(nodes), name([*nodes[:-1], "redis-node-25:6379"]), name(nodes, "other")}
    assert len(names) == 3
    assert name(nodes) == name(nodes[::-1])
    assert all(len(one) == 255 for one in names)
