"""A model that is loaded, and its steps."""
