"""Decisions: pure functions of values, without I/O, clock, randomness or framework."""
