"""Calls that are published from their records: delay_in, queue-once, relay and rescue."""
