"""Requests: who is served next, and what one does in its turn."""
