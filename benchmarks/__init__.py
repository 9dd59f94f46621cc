"""Comparisons with other software, started by hand; they are not part of the package."""
