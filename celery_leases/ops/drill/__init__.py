"""The drill behind ``leases drill``: it measures takeovers on the operator's broker and stores.

It starts workers, kills them in the middle of a harmless task, and measures how soon another worker
takes the work over.
"""
