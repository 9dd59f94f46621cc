"""Checks of an app: of its settings, its servers and its relay, at the start of a worker or for the
doctor.
"""
