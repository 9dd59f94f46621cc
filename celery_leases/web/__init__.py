"""For web processes: HTTP answers, submitting, Flask, FastAPI. The core does not import it."""
