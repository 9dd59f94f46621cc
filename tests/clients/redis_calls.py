"""Redis by redis-py."""

from typing import Any
from urllib.parse import urlsplit

from tests.clients.expectations import ERROR, INFRASTRUCTURE, UNAUTHORIZED, Places, cases, raising
from tests.clients.other_servers import redis_server
from tests.clients.servers import (
    accepts_no_connection,
    hangs_up_at_once,
    name_servers_away,
    never_speaks,
    patience,
    refuses,
)


def _redis(url: str, **options: Any) -> Any:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return redis.Redis.from_url(
        url.replace("http:", "redis:"),
        protocol=2,
        socket_timeout=patience(),
        socket_connect_timeout=patience(),
        retry=Retry(NoBackoff(), 0),
        **options,
    )


def redis(url: str) -> Any:
    with _redis(url) as client:
        return client.incr("sent")


def redis_without_password(places: Places) -> Any:
    """One counter of a server that wants a password."""
    where = urlsplit(places.redis)
    return redis(f"redis://127.0.0.1:{where.port}")


def redis_with_wrong_password(places: Places) -> Any:
    """The same, with another one."""
    where = urlsplit(places.redis)
    return redis(f"redis://:wrong@127.0.0.1:{where.port}")


def redis_script(places: Places) -> Any:
    """A script with a mistake."""
    with _redis(places.redis) as client:
        return client.eval("return redis.call('NONSENSE')", 0)


REDIS = [
    *raising(
        "redis",
        {
            "NOAUTH": (redis_without_password, UNAUTHORIZED),
            "WRONGPASS": (redis_with_wrong_password, UNAUTHORIZED),
            "READONLY": (lambda places: redis(places.redis), INFRASTRUCTURE),
            "a script's error": (redis_script, ERROR.of("ResponseError")),
        },
        needs="redis",
    ),
    *cases(
        "redis",
        redis,
        {
            "LOADING": (
                redis_server("LOADING Redis is loading the dataset in memory"),
                INFRASTRUCTURE,
            ),
            "TRYAGAIN": (
                redis_server("TRYAGAIN Multiple keys request during rehashing of slot"),
                INFRASTRUCTURE,
            ),
            "CLUSTERDOWN": (redis_server("CLUSTERDOWN The cluster is down"), INFRASTRUCTURE),
            "MISCONF": (redis_server("MISCONF Redis is configured to save"), INFRASTRUCTURE),
            "OOM": (redis_server("OOM command not allowed when used memory"), INFRASTRUCTURE),
            "NOREPLICAS": (redis_server("NOREPLICAS Not enough good replicas"), INFRASTRUCTURE),
            "BUSY": (redis_server("BUSY Redis is busy running a script"), INFRASTRUCTURE),
            "MASTERDOWN": (redis_server("MASTERDOWN Link with MASTER is down"), INFRASTRUCTURE),
            "WRONGTYPE": (
                redis_server("WRONGTYPE Operation against a key holding the wrong kind"),
                ERROR.of("ResponseError"),
            ),
            "does not answer": (never_speaks, INFRASTRUCTURE),
            "hangs up": (hangs_up_at_once, INFRASTRUCTURE),
            "refuses the connection": (refuses, INFRASTRUCTURE),
            "accepts nobody": (accepts_no_connection, INFRASTRUCTURE),
            "name servers away": (name_servers_away, INFRASTRUCTURE),
        },
    ),
]
