"""Leases and cooldown groups in Redis or Valkey."""
