"""The daemon as its clients see it: a process, and what is asked of it."""
