"""Orders, which are charged by a leased task."""
