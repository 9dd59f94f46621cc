"""Who may use a Redis lease store: client certificates, users with few rights, and passwords
that change.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_leases.decide.answers import Acquired, Renewal, RenewalResult
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.errors import ACL_COMMANDS
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.group_case import probe_due
from celery_leases.testing.waits import wait_until
from tests.contract.redis_stores import PASSWORD, Certificates, Reached, documented_user
from tests.contract.test_redis_outages import STEPS, steps
from tests.support.servers import RedisCluster, RedisSentinels, RedisServer
from tests.unit.doc_pages import markdown_rows, page


@pytest.fixture
def server(leases_redis: RedisServer) -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def refusals(store: RedisLeaseStore) -> dict[str, StoreUnavailable]:
    call = make_call(fresh_key())
    errors = {}
    for name, step in steps(store, call.key.stored).items():
        try:
            step()
        except StoreUnavailable as error:
            errors[name] = error
    return errors


def test_another_authority_is_reported_as_by_openssl(tls_store: Reached, tmp_path: Path) -> None:
    stranger = Certificates(tmp_path)
    store = RedisLeaseStore.from_url(tls_store.url, options={"ssl": stranger.client_options})
    with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED") as caught:
        store.holder("x")
    assert caught.value.executed is False


def test_a_client_without_its_certificate_is_refused(tls_store: Reached) -> None:
    """Whether alert or end of connection is read first, is random."""
    authority = tls_store.options["ssl"]["ssl_ca_certs"]
    store = RedisLeaseStore.from_url(f"{tls_store.url}?ssl_ca_certs={authority}")
    with pytest.raises(StoreUnavailable, match=r"(?i)ssl|closed|reset|broken pipe"):
        store.holder("x")


def test_a_server_without_tls_never_answers(server: RedisServer) -> None:
    store = RedisLeaseStore.from_url(server.url.replace("redis://", "rediss://"), timeout=0.4)
    with pytest.raises(StoreUnavailable, match="Timeout connecting") as caught:
        store.holder("x")
    assert caught.value.executed is False


def test_the_documented_user_notices_a_failover_and_sees_no_other_keys(acl_store: Reached) -> None:
    store = RedisLeaseStore.from_url(acl_store.url, prefix="celery_leases:own")
    assert store.age(fresh_key()) == 0.0
    _, history = store._client.get("celery_leases:own:epoch").split()
    assert len(history) == 40
    assert not refusals(store)
    others = RedisLeaseStore.from_url(acl_store.url, prefix="other")
    assert set(refusals(others)) == set(steps(store)) - {"closed_groups", "all past_closings"}


@pytest.mark.parametrize("missing", ACL_COMMANDS.split())
def test_a_right_that_is_missing_is_named(server: RedisServer, missing: str) -> None:
    words = documented_user()
    assert {word for word in words if word.startswith("+")} == set(ACL_COMMANDS.split())
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "leases", *(word for word in words if word != missing)
        )
        admin.script_flush()
        whole = RedisLeaseStore.from_url(server.url)
        probe_due(whole, "g")
        if missing == "+pexpire":  # only needed to renew an existing lease
            assert refusal_of_a_renewal(whole, server)
            return
        store = RedisLeaseStore.from_url(f"redis://leases:{PASSWORD}@127.0.0.1:{server.port}/0")
        errors = refusals(store)
    assert bool(errors) is (missing != "+info")
    if missing == "+get":  # used at the beginning of each script
        assert set(errors) == set(STEPS)
    for error in errors.values():
        assert error.executed is False
        assert f"needs ~celery_leases:* {ACL_COMMANDS}" in str(error)
        assert PASSWORD not in str(error)
        if "ACL failure" not in str(error) and "can't run" not in str(error):
            assert missing[1:] in str(error)


def refusal_of_a_renewal(whole: RedisLeaseStore, server: RedisServer) -> bool:
    """Whether the user cannot extend a lease, and the error names the missing right."""
    store = RedisLeaseStore.from_url(f"redis://leases:{PASSWORD}@127.0.0.1:{server.port}/0")
    call = make_call(fresh_key())
    assert whole.acquire(call) == Acquired()
    with pytest.raises(StoreUnavailable, match="pexpire") as caught:
        store.renew([Renewal(call.key.stored, call.token, 60.0)])
    return "the user of leases needs" in str(caught.value)


def test_without_info_only_an_emptied_store_is_noticed(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "leases", *(word for word in documented_user() if word != "+info")
        )
    meek = RedisLeaseStore.from_url(f"redis://leases:{PASSWORD}@127.0.0.1:{server.port}/0")
    whole = RedisLeaseStore.from_url(server.url)
    key = fresh_key()
    assert meek.acquire(make_call(key)) == Acquired()
    wait_until(lambda: meek.age(key) > 0.05, 10, "the store to age")
    assert whole.age(key) == 0.0
    wait_until(lambda: meek.age(key) > 0.05, 10, "the store to age")
    assert whole.age(key) > 0.05


class Rotating(redis.CredentialProvider):
    """A credential provider that counts its calls, and whose password can be changed."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.asked = 0

    def get_credentials(self) -> tuple[str]:
        self.asked += 1
        return (self.password,)


def test_a_password_may_change_under_a_store(server: RedisServer) -> None:
    """Open connections keep working; a new one asks the provider."""
    provider = Rotating("first")
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", "first")
        store = RedisLeaseStore.from_url(server.url, options={"credential_provider": provider})
        call = make_call(fresh_key())

        def renewed() -> bool:
            return store.renew([Renewal(call.key.stored, call.token, 15.0)]) == [RenewalResult.OURS]

        assert store.acquire(call) == Acquired()
        admin.config_set("requirepass", "second")
        assert renewed()
        assert provider.asked == 1
        admin.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable) as caught:
            renewed()
        assert caught.value.executed is False
        assert "first" not in str(caught.value)
        provider.password = "second"
        assert renewed()
        store.close()


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_a_provider_is_asked_by_every_kind_of_store(kind: str) -> None:
    provider = Rotating("x")
    urls = {"sentinel": "sentinel://a?master_name=m", "cluster": "redis+cluster://a"}
    store = RedisLeaseStore.from_url(urls[kind], options={"credential_provider": provider})
    client: Any = store._client if kind == "sentinel" else store._client._client(("a", 1))
    assert client.connection_pool.connection_kwargs["credential_provider"] is provider


def documented_extras() -> dict[str, list[str]]:
    """The additional rights in docs/reference/stores.md, by their purpose."""
    rows = [row for row in markdown_rows(page("stores")) if row[0].count("+")]
    return {row[1]: re.findall(r"\+[\w|]+", row[0].replace("\\", "")) for row in rows}


def test_a_cluster_needs_the_documented_rights_and_no_more(leases_redis: RedisServer) -> None:
    rights = [*documented_user(), *documented_extras()["a cluster"]]
    with RedisCluster() as cluster:
        for node in cluster.nodes:
            with redis.Redis(port=node.port) as admin:
                admin.execute_command("ACL", "SETUSER", "leases", *rights)
                admin.execute_command("ACL", "SETUSER", "default", "off")
        store = RedisLeaseStore.from_url(cluster.url.replace("//", f"//leases:{PASSWORD}@"))
        for _ in range(10):
            assert not refusals(store)
        for node in cluster.nodes:
            with redis.Redis(port=node.port, username="leases", password=PASSWORD) as user:
                user.execute_command("ASKING")
        store.close()


def test_sentinel_needs_the_documented_rights_and_no_more(leases_redis: RedisServer) -> None:
    """One user on the Sentinels, whose users are separate."""
    extras = documented_extras()
    with RedisSentinels() as sentinels:
        for server in sentinels.servers:
            with redis.Redis(port=server.port) as admin:
                more = [*extras["another database than 0"], *extras["`client_name`"]]
                admin.execute_command("ACL", "SETUSER", "leases", *documented_user(), *more)
        for server in sentinels.sentinels:
            with redis.Redis(port=server.port) as admin:
                admin.execute_command(
                    "ACL", "SETUSER", "watch", "on", f">{PASSWORD}", *extras["Sentinel"]
                )
                admin.execute_command("ACL", "SETUSER", "default", "off")
        url = (
            sentinels.url.replace("://", f"://leases:{PASSWORD}@", 1).replace("/0?", "/2?")
            + "&sentinel_username=watch"
        )
        store = RedisLeaseStore.from_url(
            f"{url}&sentinel_password={PASSWORD}", options={"client_name": "leases"}
        )
        assert not refusals(store)
        store.close()
        with pytest.raises(StoreUnavailable, match="AuthenticationError") as caught:
            RedisLeaseStore.from_url(f"{url}&sentinel_password=wrong").holder("x")
        assert caught.value.executed is False
