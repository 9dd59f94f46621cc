"""One adapter for each package: a task is unique as the package's own documentation shows.

Each module has ``configure(app, locks, seconds)``, where *locks* is the URL of the Redis for locks
and *seconds* how long they last (``None``: the package's default), and sets of options for
``@app.task``:

* ``UNIQUE``: one run at a time for each value of the argument ``name``;
* ``REFUSING``: as before, and a duplicate is an error of the class ``DUPLICATE``;
* ``SKIPPING``: as before, and a duplicate ends without a result;
* ``CHANGES``: for each ``name`` one run at a time, and at most one more with newer arguments;
* ``LIMITED``: three runs at a time, for all names together;
* ``PERIODIC``: beat calls it with the same arguments each time;
* ``REPEATING``: it publishes itself, and one call for each ``name`` is queued at a time.

Where a package has no such option, the set is the one that comes nearest.
"""
