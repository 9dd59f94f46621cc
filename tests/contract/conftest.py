"""The databases and lease stores that the tests here share."""

# ruff: noqa: F401

from tests.contract.redis_stores import (
    acl_store,
    certificates,
    cluster,
    cluster_store,
    open_store,
    sentinel_store,
    sentinels,
    store_elsewhere,
    tls_store,
    unix_store,
    valkey_url,
)
from tests.contract.sql_stores import (
    database_url,
    mariadb_records,
    server_records,
    server_url,
    sql_records,
)
