"""A small shop on FastAPI: an order is charged once, however often the button is pressed."""
