"""One adapter for each package: a task is unique as the package's own documentation shows.

Each module has ``configure(app, locks, seconds)``, where *locks* is the URL of the Redis for locks
and *seconds* how long they last (``None``: the package's default), and three sets of options for
``@app.task``: ``UNIQUE`` for one run at a time per value of the argument ``name``, ``REFUSING``
with which a duplicate is an error of the class ``DUPLICATE``, and ``SKIPPING`` with which a
duplicate ends without a result.
"""
