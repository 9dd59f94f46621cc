"""A task with an option that is refused."""
