"""Which experts lie in fast memory: policies, placements, plans, and what traces say of them. All of it is pure."""
