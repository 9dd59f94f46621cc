"""The drill: kills worker processes of its own in the middle of a harmless task, and measures how
soon the work goes on, on the operator's own broker and stores.
"""
