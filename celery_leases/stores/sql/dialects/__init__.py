"""What differs between PostgreSQL, MySQL or MariaDB, and SQLite."""
