"""Records, effects, leases, cooldown groups and stored messages in a SQL database."""
