"""The rules and the words: pure values and functions, without I/O, clock, randomness or framework."""
