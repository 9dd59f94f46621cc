"""Comparisons with other software, run by hand; nothing here is part of the package."""
