"""Private servers, workers, and child processes that end with their parent, for tests, demos and
benchmarks.
"""
