"""How a body is interrupted in each kind of worker pool, and how the steps around it are protected
from interrupts.
"""
