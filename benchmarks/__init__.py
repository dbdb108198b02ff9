"""What produces RESULTS.md; each file says how to run it."""
