"""Lease and record stores, one technology per group of modules."""
