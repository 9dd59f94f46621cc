"""One module for each contender, imported only in its environment.

Modules of contenders with Celery have ``OPTIONS`` for the task, ``configure(app)``, ``prepare()``,
which creates tables, and ``run(task, key, seconds)``, the body of the task.
"""
