"""One attempt at a call, from the acquire of its lease to the release: knows no Celery, no Redis,
no SQL.
"""
