"""Cuts the connection at each request of a delivery to a real server, before and after it."""
