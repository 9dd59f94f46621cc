"""What tests, demos and benchmarks run on: private servers, workers, and processes that end with
their parent.
"""
