"""Migrations that make the tables as ``leases migrate`` does."""
