"""Threads, locks and clocks in every kind of worker pool: system threads beside greenlets, a pool
of resources, the kill timer.
"""
