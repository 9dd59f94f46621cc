"""The state of cooldown groups, and the rules by which they are closed and opened."""
