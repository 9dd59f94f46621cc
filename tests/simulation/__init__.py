"""A simulator: the library's own code, on clocks, servers and processes that one seed controls."""
