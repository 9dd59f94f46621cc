"""How errors of a Redis client are converted: whether the command may have been executed, and no
secrets.
"""

import pytest
import redis
from redis.sentinel import MasterNotFoundError

from celery_leases.stores.redis.errors import executed, unavailable

SECRET = "s3cret-w0rd"


def test_an_error_that_repeats_the_login_shows_no_secret() -> None:
    error = redis.ResponseError(
        f"unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' '{SECRET}'"
    )
    assert SECRET not in str(unavailable("redis:h:1/0", error, SECRET))


def test_sentinels_without_a_primary_are_reported_in_one_line() -> None:
    asked = (
        f"<Redis(<Pool(password={SECRET})>)>",
        f"Redis<Pool<password={SECRET}>>",
        f"<Redis(password={SECRET})>",
    )
    came = (
        "TimeoutError('Timeout reading from socket')",
        "auth:AuthenticationError",
        "auth:AuthenticationError",
    )
    pairs = ", ".join(f"{who} - {what}" for who, what in zip(asked, came, strict=True))
    error = unavailable(
        "redis-sentinel:m/0", MasterNotFoundError(f"No master found for 'm' : {pairs}")
    )
    assert str(error).endswith(
        "No master found for 'm': no Sentinel that answers knows a primary "
        "(others: TimeoutError('Timeout reading from socket'), auth:AuthenticationError)"
    )
    error = unavailable("redis-sentinel:m/0", MasterNotFoundError("No master found for 'm'"))
    assert str(error).endswith("'m': no Sentinel that answers knows a primary")


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (MasterNotFoundError("No master found for 'm'"), False),
        (redis.ConnectionError("The previous master is now a slave"), False),
        (redis.ConnectionError("Error 1 connecting to h:1. [SSL: WRONG_VERSION_NUMBER]"), False),
        (redis.exceptions.ClusterDownError("CLUSTERDOWN"), False),
        (redis.exceptions.TryAgainError("TRYAGAIN"), False),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), False),
        (redis.exceptions.MaxConnectionsError("Too many connections"), False),
        (redis.ConnectionError("max number of clients reached"), False),
        (redis.ConnectionError("Connection closed by server."), None),
        (redis.TimeoutError("Timeout reading from socket"), None),
        (redis.TimeoutError("Timeout connecting to server"), False),
        (ConnectionResetError(104, "Connection reset by peer"), None),
        (ConnectionRefusedError(111, "Connection refused"), False),
    ],
)
def test_what_an_error_says_about_the_command(error: Exception, fate: bool | None) -> None:
    """``None`` if it is not known whether the command was executed."""
    assert executed(error) is fate
