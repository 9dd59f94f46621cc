"""The failure classifier: from an exception to an action. Pure; it knows client libraries by name
only, and no leases.
"""
