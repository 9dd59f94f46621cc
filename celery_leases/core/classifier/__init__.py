"""The failure classifier: from an exception to what the rules say of it. Pure; knows client libraries by name only."""
