"""Reaching into a body whose lease is lost, and keeping everything else out of it."""
