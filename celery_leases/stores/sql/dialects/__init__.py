"""Differences between PostgreSQL, MySQL or MariaDB, and SQLite."""
