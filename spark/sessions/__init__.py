"""Conversations that were had: what a server keeps of them on disk, and how long they are."""
