"""Private servers for tests and demos: child processes on free ports of 127.0.0.1, data in temporary directories."""

from celery_leases.testing.servers.local import LocalServer, ServerMissing
from celery_leases.testing.servers.mariadb import MariaServer
from celery_leases.testing.servers.mysql import MySQLServer
from celery_leases.testing.servers.postgres import PostgresServer
from celery_leases.testing.servers.rabbit import RabbitServer, RunningRabbit, find_running_rabbit
from celery_leases.testing.servers.redis import RedisServer
from celery_leases.testing.servers.redis_groups import RedisCluster, RedisSentinels

__all__ = [
    "LocalServer",
    "MariaServer",
    "MySQLServer",
    "PostgresServer",
    "RabbitServer",
    "RedisCluster",
    "RedisSentinels",
    "RedisServer",
    "RunningRabbit",
    "ServerMissing",
    "find_running_rabbit",
]
