"""How the body in each kind of worker pool is interrupted, and how the steps around it are
protected.
"""
