"""Private servers for tests and demos: child processes on free ports of 127.0.0.1, data in
temporary directories.
"""

from tests.support.servers.local import LocalServer, ServerMissing
from tests.support.servers.mariadb import MariaServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.pgbouncer import PgBouncer
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.rabbit import RabbitServer, RunningRabbit, find_running_rabbit
from tests.support.servers.redis import RedisServer
from tests.support.servers.redis_groups import RedisCluster, RedisSentinels

__all__ = [
    "LocalServer",
    "MariaServer",
    "MySQLServer",
    "PgBouncer",
    "PostgresServer",
    "RabbitServer",
    "RedisCluster",
    "RedisSentinels",
    "RedisServer",
    "RunningRabbit",
    "ServerMissing",
    "find_running_rabbit",
]
