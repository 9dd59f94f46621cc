"""Which options a lease store is reached with: its own, or those of a broker that is the lease
store.
"""

from typing import Any

import pytest
from celery import Celery

from celery_leases.errors import LeaseConfigurationError
from celery_leases.settings import Settings, read_settings
from celery_leases.worker.app_settings import settings_of

DATABASE = "sqlite:///x.db"
SENTINELS = "sentinel://a:26379;sentinel://b:26379/0"


def settings(broker: Any, options: dict[str, Any] | None = None, **conf: Any) -> Settings:
    """The settings of an app with that broker."""
    app = Celery("settings", broker=broker, set_as_current=False)
    app.conf.update(leases_database_url=DATABASE, broker_transport_options=options or {}, **conf)
    return settings_of(app)


def test_a_broker_that_is_the_lease_store_brings_its_options_and_its_tls() -> None:
    found = settings(
        "rediss://h/0", {"client_name": "w"}, broker_use_ssl={"ssl_ca_certs": "/ca.pem"}
    )
    assert found.leases_url == "rediss://h/0"
    assert found.transport_options == {"client_name": "w", "ssl": {"ssl_ca_certs": "/ca.pem"}}
    for leases_url in (None, "sentinel://a:26379;sentinel://b:26379/1"):
        given = {"leases_url": leases_url} if leases_url else {}
        found = settings(SENTINELS, {"master_name": "m"}, **given)
        assert found.leases_url == (leases_url or SENTINELS)
        assert found.transport_options == {"master_name": "m"}
    assert (
        settings(["sentinel://a", "sentinel://b"], {"master_name": "m"}).leases_url
        == "sentinel://a;sentinel://b"
    )


@pytest.mark.parametrize("leases_url", ["redis://h/1", "redis+cluster://h", "database"])
def test_another_lease_store_has_options_of_its_own(leases_url: str) -> None:
    found = settings(
        "redis://h/0", {"client_name": "w"}, leases_url=leases_url, broker_use_ssl=True
    )
    assert found.transport_options == {}
    own = {"client_name": "leases"}
    assert (
        settings(
            "redis://h/0", leases_url=leases_url, leases_transport_options=own
        ).transport_options
        == own
    )


def test_options_of_its_own_replace_those_of_the_broker() -> None:
    found = settings("redis://h/0", {"client_name": "w"}, leases_transport_options={})
    assert (found.leases_url, found.transport_options) == ("redis://h/0", {})


def test_options_that_are_no_dict_are_refused() -> None:
    with pytest.raises(LeaseConfigurationError, match="leases_transport_options is of type str"):
        read_settings(
            {"leases_transport_options": "x", "leases_database_url": DATABASE}, "redis://h"
        )


def test_a_broker_from_the_environment_is_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://broker:6379/3")
    app = Celery("environment")
    app.conf.update(
        leases_database_url="sqlite://", broker_transport_options={"visibility_timeout": 60}
    )
    settings = settings_of(app)
    assert (settings.leases_url, settings.longest_countdown) == ("redis://broker:6379/3", 30.0)
