# The programs of docker-compose.yml: the example project on the sources beside this file.
FROM python:3.12-slim
WORKDIR /srv
COPY pyproject.toml README.md LICENSE ./
COPY celery_leases ./celery_leases
RUN pip install --no-cache-dir ".[postgresql,flask]"
COPY example_project ./example_project
RUN useradd --create-home worker
USER worker
CMD ["celery", "-A", "example_project", "worker", "--loglevel", "INFO", "--concurrency", "2"]
