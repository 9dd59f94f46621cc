"""Durations, texts from outside, and the redaction of secrets: pure functions for all packages."""
