"""Conversations as text that a model reads and writes: turns, reasoning, calls of tools."""
