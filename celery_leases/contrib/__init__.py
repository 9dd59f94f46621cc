"""Integrations with web frameworks: one module or package for each."""
