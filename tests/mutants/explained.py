"""Mutations that no test can notice, each with the reason: they change nothing that is promised."""

EXPLAINED: dict[str, str] = {}
"""By the name of the mutation."""
