"""One module for each contender, imported in its environment only.

Those on Celery have ``OPTIONS`` for the task, ``configure(app)``, ``prepare()``, which makes
tables, and ``run(task, key, seconds)``, which is the body of the task.
"""
