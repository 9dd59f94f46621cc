"""The failure classifier: from an exception to an action. Pure; it imports no client library, and
does not depend on leases.
"""
