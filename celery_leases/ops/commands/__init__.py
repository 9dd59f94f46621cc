"""The commands for operators, which ``celery leases`` adds to its own."""
