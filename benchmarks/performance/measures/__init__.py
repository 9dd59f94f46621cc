"""One module for each kind of measurement; each has ``measure(bench, quick)``, which gives a
finding.
"""
