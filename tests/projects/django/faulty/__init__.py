"""Tasks with mistakes that the system checks name."""
