"""Durations, texts from outside, and the redaction of secrets: pure functions that every room
uses.
"""
