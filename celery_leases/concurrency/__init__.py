"""Threads, locks and clocks under any pool: real threads beside greenlets, a resource pool, the
kill timer.
"""
