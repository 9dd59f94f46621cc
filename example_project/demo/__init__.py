"""Starts the demos, prints their events, and checks their promises."""
