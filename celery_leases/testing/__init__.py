"""Test tools: private servers, real worker processes, store contracts and a pytest plugin."""
