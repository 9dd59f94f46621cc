"""The rules of leases and records: pure values and functions, without I/O, clock, randomness or
framework.
"""
